"""List the tensors of a model before any is allocated: a skeleton of it on the meta device, checked and described."""

import functools
import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from plumbline.model.attention.kind import Attention
from plumbline.model.blocks.kind import Block
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.kinds import check_written
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.objectives.objective import Objective, ObjectiveSettings, TrainedLM
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import OF_CONTEXT, Role, TensorRule, tensor_rule

OWN: dict[type[nn.Module], tuple[str, ...]] = {
    Block: ("forward",),
    Attention: ("forward", "scaled_module"),
    Objective: ("terms", "targets", "forward"),
}
"""What every kind has to have of its own."""


@dataclass(frozen=True)
class ModelTensor:
    """Describe a tensor before it is allocated."""

    shape: tuple[int, ...]
    rule: TensorRule


class NoInitialValues(TorchFunctionMode):
    """Skip the initialisation in torch's own modules, which takes as long as ours that replaces it.

    On the meta device torch would import its whole compiler for it, which takes longer than all the rest of planning.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor of an initialisation function unchanged, or call any other function."""
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


@functools.lru_cache
def model_tensors(model: ModelConfig, objective: ObjectiveConfig | None = None) -> dict[str, ModelTensor]:
    """Return shape and rule of every tensor by name (a tied head has none), in the order of `named_parameters()`.

    With an objective, the tensors that it adds are included.
    """
    with torch.device("meta"), NoInitialValues():
        forward = Multipliers(attention=1.0)
        if objective is None:
            skeleton = CausalLM(model, forward)
        else:
            check_written(objective, ObjectiveSettings, ("make",))
            skeleton = TrainedLM(model, forward, objective.make(model, forward, 0))
    for module in skeleton.modules():
        for base, members in OWN.items():
            if isinstance(module, base):
                check_written(module, base, members)
    _check_buffers(skeleton)
    _check_branches(skeleton)
    found = {
        name: ModelTensor(tuple(parameter.shape), tensor_rule(skeleton, name))
        for name, parameter in skeleton.named_parameters()
    }
    for name, tensor in found.items():
        if tensor.rule.role == "hidden_matrix" and len(tensor.shape) != 2:
            raise ValueError(
                f"parameter {name!r} is a hidden_matrix of shape {list(tensor.shape)}: initialization, optimizers and "
                "rounding know [fan-out, fan-in] alone; make it several matrices"
            )
    return found


def _check_buffers(skeleton: nn.Module) -> None:
    """Refuse buffers that a run would lose, since checkpoints, exports and averages hold only parameters.

    Raises:
        ValueError: names a buffer that is persistent, or that has no value on the meta device.
    """
    saved = skeleton.state_dict().keys()
    for name, buffer in skeleton.named_buffers():
        if name in saved or buffer.is_meta:
            raise ValueError(
                f"buffer {name!r}: checkpoints and exports hold parameters alone; make it a parameter whose TensorRule "
                "has trains=lambda _: False, or a constant: register_buffer(..., persistent=False) of a tensor that is "
                'made with device="cpu"'
            )


def _check_branches(skeleton: nn.Module) -> None:
    """Refuse a block that adds a branch by itself, since the table's factor would not be applied.

    Raises:
        ValueError: names block and branch.
    """
    for name, block in skeleton.named_modules():
        for branch in block.branch_ends if isinstance(block, Block) else ():
            if not isinstance(getattr(block, f"{branch}_residual", None), Residual):
                raise ValueError(
                    f"{name} ({type(block).__name__}) has no Residual named {branch}_residual: a branch joins the "
                    f"stream by one (model/blocks/residual.py), or leave {branch!r} out of branch_ends"
                )


def parameter_shapes(
    model: ModelConfig, objective: ObjectiveConfig | None = None, roles: Container[Role] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the same tensors by name, or only of those with one of `roles`."""
    found = model_tensors(model, objective).items()
    return {name: tensor.shape for name, tensor in found if roles is None or tensor.rule.role in roles}


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the model, without those that are `OF_CONTEXT`."""
    counted = [tensor for tensor in model_tensors(model).values() if tensor.rule.role not in OF_CONTEXT]
    return sum(math.prod(tensor.shape) for tensor in counted)
