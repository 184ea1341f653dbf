"""Refuse weights that are not finite, with which a model computes nan or cannot be sampled."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from plumbline.data.damage import DamagedFileError


def check_finite(weights: Mapping[str, Tensor], folder: Path, remedy: str) -> None:
    """Check every value once, which costs little compared with reading it.

    Args:
        weights: the tensors, by name.
        folder: where they were read from.
        remedy: what to do about it, at the end of the message.

    Raises:
        DamagedFileError: a value is nan or infinite; names file and tensor.
    """
    for name, weight in weights.items():
        if not is_finite(weight):
            file, tensor = _found_in(sorted(folder.rglob("*.safetensors"))) or (folder, name)
            wrong = int((~torch.isfinite(weight.float())).sum())
            raise DamagedFileError(f"{file}: {tensor}: {wrong} of {weight.numel()} values are nan or inf; {remedy}")


def is_finite(weight: Tensor) -> bool:
    """Return whether no value of a tensor is nan or infinite."""
    if weight.numel() == 0 or not weight.is_floating_point():
        return True
    wide = weight.float() if weight.element_size() == 1 else weight  # torch has no aminmax for 8-bit types
    return bool(torch.isfinite(torch.stack(torch.aminmax(wide))).all())  # a nan is both the minimum and the maximum


def _found_in(files: Iterable[Path]) -> tuple[Path, str] | None:
    """Return the file and original name of the first tensor that is not finite, since classes rename tensors."""
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                if not is_finite(opened.get_tensor(name)):
                    return file, name
    return None
