"""Copy a state out of training's reach, into host memory."""

import copy
from typing import Any

from torch import Tensor


def copy_to_host(value: Any) -> Any:
    """Return a deep copy of nested containers with every tensor on the CPU.

    Of a tensor that is a view only its own elements are copied, and of views that are the same, one copy is made.
    """
    return _copy(value, {})


def _copy(value: Any, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        place = (value.device, value.untyped_storage().data_ptr(), value.storage_offset())
        key = (*place, value.shape, value.stride(), value.dtype)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        copied = copy.copy(value)  # of its own class, and with the attributes that a state_dict has
        for name, child in value.items():
            copied[name] = _copy(child, copies)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copy(child, copies) for child in value)
    return copy.deepcopy(value)
