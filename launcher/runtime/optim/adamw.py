"""Use torch's fused AdamW for every tensor that no other optimizer updates."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plumbline.launcher.runtime.optim.kind import Groups, OptimizerKind


def _make(groups: Groups, _sharded: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True)


def _unit_update(state: Mapping[str, Tensor], group: Mapping[str, Any], updates: int) -> Tensor:
    """Return m / sqrt(v), each with its bias correction; 0 where there was no gradient yet."""
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"] / (1 - beta1**updates)
    root = (state["exp_avg_sq"] / (1 - beta2**updates)).sqrt()
    return torch.where(root > 0, mean / root, 0.0)


ADAMW = OptimizerKind(
    "adamw",
    _make,
    all_tensors=True,
    keeps_sde=True,
    zero_stages=(0, 1, 2, 3),
    skips_on_device=True,
    unit_update=_unit_update,
    on_deepspeeds_list=True,
)
