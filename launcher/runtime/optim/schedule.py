"""The learning-rate schedule: a pure function of the tokens consumed, so there is nothing to save or to resume.

The factor multiplies every group's own peak learning rate (base lr x the parameterization's multiplier). DeepSpeed's
schedulers are not used: several of them write one absolute rate into all groups. docs/schedules.md shows the shapes.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt
from pydantic import model_validator as validator

from plumbline.data.batch_plan import BatchPlan

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "one_minus_sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "square": lambda x: 1 - x * x,
}
"""What is left of the way from the peak to the end value at x in [0, 1] of a decay. exponential is no such blend."""

WARMUP = ("warmup_steps", "warmup_tokens", "warmup_fraction")
DECAY = ("decay_steps", "decay_tokens", "decay_fraction")
BRANCH = ("steps", "tokens", "fraction")


class BranchConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """A cooldown from a checkpoint of another run, the parent, in a run folder of its own (checkpoint/branch.py).

    Its shape and end value are those of the schedule section. The run ends when the cooldown does; train.steps and
    train.tokens stay the parent's.
    """

    checkpoint: str
    """A checkpoint folder of the parent, or the parent's run folder for its newest whole checkpoint."""
    steps: PositiveInt | None = None
    """Length of the cooldown in steps. Give this, tokens or fraction."""
    tokens: PositiveInt | None = None
    """The same in tokens, rounded up to whole steps."""
    fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """The same as a fraction of the tokens that the parent had consumed, rounded up to whole steps."""
    from_step: PositiveInt | None = None
    """Step of the checkpoint. Found out when the branch starts, and kept from then on."""

    @validator(mode="after")
    def _check(self) -> "BranchConfig":
        _one_of(self, BRANCH)
        if all(getattr(self, key) is None for key in BRANCH):
            raise ValueError("how long is the cooldown? give steps, tokens or fraction")
        return self

    @property
    def first_step(self) -> int:
        """Steps of the parent that this run continues."""
        assert self.from_step is not None, "branch.resolve finds it out"
        return self.from_step

    def last_step(self, plan: BatchPlan) -> int:
        """Step at which the cooldown ends."""
        if self.steps is not None:
            return self.first_step + self.steps
        start = plan.tokens_before(self.first_step)
        return plan.steps_for(start + (self.tokens or max(1, round((self.fraction or 0.0) * start))))


class ScheduleConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Linear warm-up, then one of four shapes."""

    name: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """Warmup-stable-decay; half a cosine or a straight line from the warm-up to the end; or constant."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which the rate rises linearly from peak / warmup_steps to the peak. 0 when no warmup_ key is given."""
    warmup_tokens: NonNegativeInt | None = None
    """The same in tokens."""
    warmup_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    """The same as a fraction of all tokens, rounded to whole steps."""
    decay_steps: PositiveInt | None = None
    """wsd: the last steps, over which the rate falls."""
    decay_tokens: PositiveInt | None = None
    """The same in tokens."""
    decay_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """The same as a fraction of all tokens, rounded to whole steps. 0.2 when no decay_ key is given."""
    cooldown: Literal["linear", "one_minus_sqrt", "cosine", "square", "exponential"] = "linear"
    """Shape of the decay of wsd and of a branch. one_minus_sqrt is better than linear in arXiv 2405.18392."""
    final_lr_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate at the end, as a fraction of the peak. nanoGPT uses 0.1; 0 is better for long runs (arXiv 2502.15938)."""
    lr_scaling: Literal["none", "sqrt"] = "none"
    """During data.batch_size_warmup. none: the rate of the full batch; sqrt: that times the root of batch size / full
    batch size, Adam's rule for the rate (arXiv 2205.10287)."""
    branch: BranchConfig | None = None
    """Cool down from a checkpoint of another run instead of training from the start."""

    @validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Write down the defaults that depend on what else is given, so that the resolved configuration shows them."""
        if not isinstance(values, dict):
            return values
        defaults: dict[str, Any] = {}
        if all(values.get(key) is None for key in WARMUP):
            defaults["warmup_steps"] = 0
        if all(values.get(key) is None for key in DECAY):
            defaults["decay_fraction"] = 0.2
        return {**values, **defaults}

    @validator(mode="after")
    def _check(self) -> "ScheduleConfig":
        _one_of(self, WARMUP)
        _one_of(self, DECAY)
        if self.cooldown == "exponential" and self.final_lr_fraction == 0:
            raise ValueError(
                "final_lr_fraction = 0.0: an exponential cooldown never gets there; set it above 0 (0.01, say) or take "
                "another cooldown"
            )
        return self


def _one_of(config: BaseModel, keys: tuple[str, ...]) -> None:
    """Refuse a duration that is given in two units."""
    given = [f"{key} = {getattr(config, key)}" for key in keys if getattr(config, key) is not None]
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: give one of them; KEY=null takes another away")


class Schedule:
    """The learning rate of one run: a ScheduleConfig with its durations counted in tokens.

    Attributes:
        warmup_end: tokens consumed when the warm-up is over.
        decay_start: tokens consumed when the decay begins; between the two the rate is at its peak.
        end: tokens of the whole run.
    """

    def __init__(self, config: ScheduleConfig, plan: BatchPlan, total_steps: int) -> None:
        self.config, self.plan = config, plan
        self.end = plan.tokens_before(total_steps)
        if config.warmup_tokens is not None:
            self.warmup_end = config.warmup_tokens
        elif config.warmup_fraction is not None:
            self.warmup_end = self._fraction(config.warmup_fraction)
        else:
            self.warmup_end = plan.tokens_before(config.warmup_steps or 0)
        if config.branch is not None:
            self.decay_start = plan.tokens_before(config.branch.first_step)
            self.warmup_end = min(self.warmup_end, self.decay_start)  # a fraction is of another end than the parent's
        else:
            self.decay_start = max(self.warmup_end, self._decay_start(total_steps))

    def _decay_start(self, total_steps: int) -> int:
        """Where the decay would begin without a warm-up."""
        config = self.config
        if config.name != "wsd":
            return self.end if config.name == "constant" else 0
        if config.decay_steps is not None:
            return self.plan.tokens_before(max(0, total_steps - config.decay_steps))
        if config.decay_tokens is not None:
            return self.end - config.decay_tokens
        assert config.decay_fraction is not None, "ScheduleConfig fills it in"
        return self.end - self._fraction(config.decay_fraction)

    def _fraction(self, fraction: float) -> int:
        """A fraction of all tokens, rounded to whole steps of the full batch."""
        step = self.plan.batch_size * self.plan.sequence_length
        return round(fraction * (self.end / step)) * step

    def factor(self, tokens: int) -> float:
        """Factor on every group's peak learning rate for the update that is made after `tokens` tokens.

        The last update of the warm-up and the first one after it run at 1. The decay reaches final_lr_fraction just
        after the last update, so no update is spent at a rate of zero.
        """
        step = self.plan.steps_for(tokens)
        factor = self._phase(tokens, self.plan.tokens_before(step + 1))
        if self.config.lr_scaling == "sqrt":
            factor *= math.sqrt(self.plan.batch_size_at(step) / self.plan.batch_size)
        return factor

    def _phase(self, tokens: int, after: int) -> float:
        """The factor for a full batch, of the update that takes training from `tokens` to `after` tokens."""
        if tokens < self.warmup_end:
            return min(1.0, after / self.warmup_end)
        progress = max(0.0, (tokens - self.decay_start) / max(1, self.end - self.decay_start))  # 0 until the decay
        final, shape = self.config.final_lr_fraction, self._shape
        if shape == "exponential":
            return math.pow(final, progress)
        return final + (1 - final) * SHAPES[shape](progress)

    @property
    def _shape(self) -> str:
        """How the rate falls; a constant one never does."""
        config = self.config
        return config.name if config.name in ("cosine", "linear") and config.branch is None else config.cooldown

    def describe(self) -> str:
        """The phases in one line, by the steps at which they end."""
        warmup, decay, end = (self.plan.steps_for(tokens) for tokens in (self.warmup_end, self.decay_start, self.end))
        phases = [f"warm-up to step {warmup:,}"] if warmup else []
        if decay > warmup:
            phases.append(f"peak to step {decay:,}")
        if end > decay:
            phases.append(f"{self._shape} decay to {self.config.final_lr_fraction:g} of the peak at step {end:,}")
        return f"{self.config.name}: {', '.join(phases)}"
