"""Define what every optimizer states about itself, so that nobody else asks for it by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plumbline.model.parameterization.config import MatrixUpdate

Groups = list[dict[str, Any]]


def _no_cautions(_keys: Any, _base_hidden_size: int | None) -> Iterator[str]:
    yield from ()


def _nothing(_shape: tuple[int, ...], _keys: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class OptimizerKind:
    """State what the groups, the configuration and the engine must know of one optimizer.

    Each kind is one file of this folder and one line of `OPTIMIZERS`.
    """

    name: str
    make: Callable[[Groups, bool], torch.optim.Optimizer]
    """Builds it from its parameter groups, and whether an engine will cut them into flat shards."""
    all_tensors: bool = False
    """Whether it updates every tensor; if not, it updates the hidden matrices and AdamW the rest."""
    reads: tuple[str, ...] = ("eps", "betas")
    """Which of the table's further settings its groups carry."""
    own_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the optimizer section that no other one uses -> their defaults; its groups carry them as well."""
    matrix_update: MatrixUpdate = "elementwise"
    """What it makes of a hidden matrix's gradient, which decides how the learning rate scales with width."""
    keeps_sde: bool = False
    """Whether horizon.rule complete_dp, a limit of AdamW, holds for it."""
    zero_stages: tuple[int, ...] = (0,)
    """ZeRO stages that it serves. From stage 1 on it is given flat shards of many tensors, cut anywhere: an update
    that is not elementwise would be another one there."""
    offload_refusal: str | None = None
    """Why its state cannot be in the host's memory; None: it can."""
    skips_on_device: bool = False
    """Whether a step changes nothing where `found_inf` of the optimizer, a number on the device, is 1."""
    unit_update: Callable[[Mapping[str, Tensor], Mapping[str, Any], int], Tensor] | None = None
    """Returns the update that the state implies at a learning rate of 1, without eps and weight decay, from (state of a
    part of a tensor, its group, updates so far). None: a part of the state does not tell it, or its size depends on
    more, as that of an orthogonal update on the rank of the gradient; then guards.transfer leaves these tensors out."""
    on_deepspeeds_list: bool = False
    """Whether DeepSpeed has it on its list of optimizers that work with ZeRO."""
    cautions: Callable[[Any, int | None], Iterator[str]] = _no_cautions
    """A sentence for each setting that is allowed and does not scale: (optimizer section, width of the base, or None
    where the model is not wider)."""
    state_beyond_adamw: Callable[[tuple[int, ...], Any], float] = _nothing
    """Bytes of state for a tensor of a shape over AdamW's two fp32 moments, from the optimizer section."""
