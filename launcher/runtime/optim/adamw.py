"""Choose AdamW, torch's fused one, for every tensor that no other optimizer takes over."""

import torch

from plumbline.launcher.runtime.optim.kind import Groups, OptimizerKind


def _make(groups: Groups, _sharded: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True)


ADAMW = OptimizerKind("adamw", _make, all_tensors=True, keeps_sde=True, skips_on_device=True, on_deepspeeds_list=True)
