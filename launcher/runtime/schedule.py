"""The learning-rate schedule: a pure function of the step, so there is nothing to save or to resume.

The factor it returns multiplies every group's own peak learning rate (base lr x the parameterization's multiplier).
DeepSpeed's schedulers are not used: several of them write one absolute rate into all groups.
"""

import math
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt


class ScheduleConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Linear warm-up, then one of four shapes."""

    name: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """Warmup-stable-decay (linear cooldown), half cosine, straight line, or constant."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from peak / warmup_steps to the peak."""
    decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    """wsd: the last fraction of all steps, over which the rate falls."""
    final_lr_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate at the end, as a fraction of the peak. nanoGPT uses 0.1; 0 is better for long runs (arXiv 2502.15938)."""


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor on every group's peak learning rate for the update that follows `step` completed steps.

    The first update after the warm-up runs at 1. The decay reaches final_lr_fraction just after the last update, so no
    update is spent at a rate of zero.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    decay_steps = total_steps - config.warmup_steps
    if config.name == "wsd":
        decay_steps = min(decay_steps, round(config.decay_fraction * total_steps))
    progress = max(0.0, (step - (total_steps - decay_steps)) / max(1, decay_steps))  # 0 at the start of the decay
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.name == "cosine" else 1 - progress
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * remaining
