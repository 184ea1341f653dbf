"""Define what every optimizer declares about itself, so that no other code depends on its name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plumbline.model.parameterization.config import MatrixUpdate

Groups = list[dict[str, Any]]


Shapes = Mapping[str, tuple[int, ...]]


def _no_cautions(_keys: Any, _base_hidden_size: int | None, _shapes: Shapes) -> Iterator[str]:
    yield from ()


def _nothing(_shape: tuple[int, ...], _keys: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class OptimizerKind:
    """Declare what the groups, the configuration and the engine must know about one optimizer.

    Each kind is one file of this folder and one line of `OPTIMIZERS`.
    """

    name: str
    make: Callable[[Groups, bool], torch.optim.Optimizer]
    """Builds it from its parameter groups and whether an engine will cut them into flat shards."""
    all_tensors: bool = False
    """Whether it updates every tensor; if not, it updates the hidden matrices and AdamW the rest."""
    reads: tuple[str, ...] = ("eps", "betas")
    """Which other settings of the table its groups carry."""
    own_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the optimizer section that only this optimizer uses -> their defaults; its groups carry them too."""
    matrix_update: MatrixUpdate = "elementwise"
    """Kind of its update of a hidden matrix, which decides how the learning rate scales with width."""
    keeps_sde: bool = False
    """Whether horizon.rule complete_dp, derived from AdamW's SDE limit, applies to it."""
    zero_stages: tuple[int, ...] = (0,)
    """ZeRO stages that it supports. From stage 1 on it gets flat shards of many tensors, cut anywhere, which would
    change an update that is not elementwise."""
    offload_refusal: str | None = None
    """Why its state cannot be in host memory, or None if it can."""
    skips_on_device: bool = False
    """Whether a step changes nothing if the optimizer's `found_inf`, a number on the device, is 1."""
    unit_update: Callable[[Mapping[str, Tensor], Mapping[str, Any], int], Tensor] | None = None
    """Returns the update implied by the state at a learning rate of 1, without eps and weight decay, from (state of a
    part of a tensor, its group, updates so far). None if part of the state does not determine it, or its size depends
    on more, as that of an orthogonal update on the rank of the gradient; guards.transfer then skips these tensors."""
    on_deepspeeds_list: bool = False
    """Whether it is on DeepSpeed's list of optimizers that work with ZeRO."""
    cautions: Callable[[Any, int | None, Shapes], Iterator[str]] = _no_cautions
    """Yields a sentence for each setting that is allowed but does not scale or fit, from (optimizer section, width of
    the base, or None if the model is not wider, shapes of the hidden matrices that train, by name)."""
    state_beyond_adamw: Callable[[tuple[int, ...], Any], float] = _nothing
    """Returns the bytes of state beyond AdamW's two fp32 moments, from (shape of a tensor, optimizer section)."""
