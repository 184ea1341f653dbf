"""Schedule the learning rate: a pure function of the tokens consumed, so there is no state to save.

The factor multiplies every group's own peak learning rate (base lr x the parameterization's multiplier). DeepSpeed's
schedulers are not used: several of them write one absolute rate into all groups. docs/schedules.md shows the shapes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field, PositiveInt
from pydantic import model_validator as validator

from plumbline.data.batch_plan import BatchPlan
from plumbline.data.paths import HomePath
from plumbline.launcher.runtime.optim.duration import Duration, DurationKey
from plumbline.model.kinds import kind_named


@dataclass(frozen=True)
class Cooldown:
    """Describe how the rate falls."""

    factor: Callable[[float, float], float]
    """Returns the rate as a fraction of the peak, from (progress x in [0, 1] of the decay, end value)."""
    reaches_zero: bool = True
    """Whether the end value may be 0."""


def _blend(left: Callable[[float], float]) -> Cooldown:
    """Return a cooldown in which `left`(x) of the way from peak to end value remains: left(0) = 1, left(1) = 0."""
    return Cooldown(lambda x, end: end + (1 - end) * left(x))


COOLDOWNS = {
    "linear": _blend(lambda x: 1 - x),
    "one_minus_sqrt": _blend(lambda x: 1 - math.sqrt(x)),
    "cosine": _blend(lambda x: (1 + math.cos(math.pi * x)) / 2),
    "square": _blend(lambda x: 1 - x * x),
    "exponential": Cooldown(lambda x, end: math.pow(end, x), reaches_zero=False),
}


@dataclass(frozen=True)
class Shape:
    """Describe the rate after the warm-up."""

    falls: Literal["at the end", "all the way", "never"]
    """When it falls; at the end: for `decay`."""
    cooldown: str | None = None
    """How it falls, one of COOLDOWNS; None: as `cooldown` of the section says."""


SHAPES = {
    "wsd": Shape("at the end"),
    "cosine": Shape("all the way", "cosine"),
    "linear": Shape("all the way", "linear"),
    "constant": Shape("never"),
}


class BranchConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Cool down from a checkpoint of another run, the parent, in a run folder of its own (checkpoint/branch.py).

    The shape and end value are those of the schedule section. The run ends with the cooldown; train.steps and
    train.tokens remain those of the parent.
    """

    checkpoint: HomePath
    """A checkpoint folder of the parent, or the parent's run folder for its newest whole checkpoint."""
    steps: PositiveInt | None = None
    """Length of the cooldown in steps. Give this, tokens or fraction."""
    tokens: PositiveInt | None = None
    """Length of the cooldown in tokens, rounded up to whole steps."""
    fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """Length of the cooldown as a fraction of the tokens that the parent had consumed, rounded up to whole steps."""
    from_step: PositiveInt | None = None
    """Step of the checkpoint. It is determined when the branch starts, and fixed from then on."""

    @validator(mode="after")
    def _check(self) -> "BranchConfig":
        _ = self.length
        return self

    @property
    def length(self) -> Duration:
        """Return the length of the cooldown."""
        return Duration.one_of(steps=self.steps, tokens=self.tokens, fraction=self.fraction)

    @property
    def first_step(self) -> int:
        """Return the step of the parent's checkpoint from which this run continues."""
        assert self.from_step is not None, "branch.resolve finds it out"
        return self.from_step

    def last_step(self, batch_plan: BatchPlan) -> int:
        """Return the step at which the cooldown ends."""
        return self.length.end_step(batch_plan, self.first_step)


class ScheduleConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Raise the rate linearly, then follow a shape."""

    name: str = "wsd"
    """Shape of the rate after the warm-up. wsd: constant, then a decay; cosine, linear: half a cosine or a straight
    line to the end; constant: no decay."""
    warmup: DurationKey = Duration(0, "steps")
    """How long the rate rises linearly to the peak: 40 steps, 1e9 tokens or 2% of all tokens, rounded to whole
    steps."""
    decay: DurationKey = Duration(0.2, "fraction")
    """For `name: wsd`: how long the rate falls at the end, in the same units."""
    cooldown: str = "linear"
    """Shape of the decay of wsd and of a branch (docs/schedules.md). one_minus_sqrt is better than linear in arXiv
    2405.18392."""
    final_lr_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate at the end, as a fraction of the peak. nanoGPT uses 0.1; 0 is better for long runs (arXiv 2502.15938)."""
    lr_scaling: Literal["none", "sqrt"] = "none"
    """Effect of data.batch_size_warmup on the rate. none: the rate of the full batch; sqrt: that times the square root
    of batch size / full batch size, Adam's rule for the rate (arXiv 2205.10287)."""
    branch: BranchConfig | None = Field(default=None, json_schema_extra={"shapes": "run"})
    """Cool down from a checkpoint of another run instead of training from the start (docs/schedules.md). None: no
    branch."""

    @validator(mode="after")
    def _check(self) -> "ScheduleConfig":
        kind_named(SHAPES, "name", self.name)
        if self.decay.amount == 0:
            raise ValueError(f"decay = {self.decay}: must be longer; name: constant never decays")
        if not kind_named(COOLDOWNS, "cooldown", self.cooldown).reaches_zero and self.final_lr_fraction == 0:
            raise ValueError(
                f"final_lr_fraction = 0.0: an {self.cooldown} cooldown never gets there; set it above 0 (0.01, say) or "
                "take another cooldown"
            )
        return self

    def cautions(self, warms_up_batch: bool) -> Iterator[str]:
        """Yield a sentence on the keys that have values of their own but no effect; a branch has its own phases.

        Args:
            warms_up_batch: whether the batch grows during the run.
        """
        shape = SHAPES[self.name]
        idle = [] if shape.falls == "at the end" else ["decay"]
        idle += ["cooldown"] if shape.cooldown is not None or shape.falls == "never" else []
        idle += ["final_lr_fraction"] if shape.falls == "never" else []
        fields = ScheduleConfig.model_fields
        told = [f"schedule.{key} = {value}" for key in idle if (value := getattr(self, key)) != fields[key].default]
        if told and self.branch is None:
            yield f"schedule.name = {self.name}: {', '.join(told)} without effect"
        if self.lr_scaling != "none" and not warms_up_batch:
            yield f"schedule.lr_scaling = {self.lr_scaling} without effect: there is no data.batch_size_warmup"


def check_phases(config: ScheduleConfig, batch_plan: BatchPlan, total_steps: int) -> None:
    """Refuse warm-ups and a wsd decay that do not fit into the run; a branch has its parent's.

    Raises:
        ValueError: together they are longer than the run, no step has the full batch, or the decay is at most one step,
            which still runs at the peak. A decay given as a fraction may be, so that a few steps can be tried.
    """
    if config.branch is not None:
        return
    full = batch_plan.stages[-1].first_step
    if full >= total_steps > 0:
        raise ValueError(
            f"data.batch_size_warmup: it lasts to step {full:,}, but the run has {total_steps:,}: shorten it, take it "
            "away (data.batch_size_warmup=[]), or train for longer"
        )
    phases = {"warmup": config.warmup.steps_of(batch_plan, total_steps)}
    if SHAPES[config.name].falls == "at the end":
        phases["decay"] = config.decay.steps_of(batch_plan, total_steps)
        one_step = config.decay.before_end(batch_plan, total_steps) <= batch_plan.tokens_per_step
        if one_step and config.decay.unit != "fraction":
            raise ValueError(
                f"schedule.decay = {config.decay}: in one step or less ({batch_plan.tokens_per_step:,} tokens) the "
                "rate would never decay; make it longer, or set schedule.name to constant"
            )
    lengths = " and ".join(f"schedule.{phase} = {getattr(config, phase)}" for phase in phases)
    shorten = "shorten them (5% and 20% fit any length), or train for longer"
    if sum(phases.values()) > total_steps:
        raise ValueError(f"{lengths}: {sum(phases.values()):,} steps, but the run has {total_steps:,}: {shorten}")
    # With steps of several sizes, phases may fit by steps of the full batch and still not by tokens
    end = batch_plan.tokens_before(total_steps)
    tokens = config.warmup.from_start(batch_plan, end)
    if "decay" in phases:
        tokens += config.decay.before_end(batch_plan, total_steps)
    if batch_plan.warmup and tokens > end:
        raise ValueError(f"{lengths}: {tokens:,} tokens, but the run has {end:,}: {shorten}")


class Schedule:
    """Convert the durations of a ScheduleConfig to tokens, and compute the learning rate of one run.

    Attributes:
        warmup_end: tokens consumed when the warm-up is over.
        decay_start: tokens consumed when the decay begins; between the two the rate is at its peak.
        end: tokens of the whole run.
    """

    def __init__(self, config: ScheduleConfig, batch_plan: BatchPlan, total_steps: int) -> None:
        self.config, self.batch_plan = config, batch_plan
        self.end = batch_plan.tokens_before(total_steps)
        self.warmup_end = config.warmup.from_start(batch_plan, self.end)
        if config.branch is not None:
            self.decay_start = batch_plan.tokens_before(config.branch.first_step)
            self.warmup_end = min(self.warmup_end, self.decay_start)  # a fraction is of another end
        else:
            before_end = config.decay.before_end(batch_plan, total_steps)
            decays_from = {"at the end": self.end - before_end, "all the way": 0, "never": self.end}
            self.decay_start = max(self.warmup_end, decays_from[SHAPES[config.name].falls])

    def factor(self, tokens: int) -> float:
        """Return the factor on every group's peak learning rate for the update after `tokens` tokens.

        The last update of the warm-up and the first one after it run at 1. The decay reaches final_lr_fraction just
        after the last update, so no update is spent at a rate of zero.
        """
        step = self.batch_plan.steps_for(tokens)
        factor = self._phase(tokens, self.batch_plan.tokens_before(step + 1))
        if self.config.lr_scaling == "sqrt":
            factor *= math.sqrt(self.batch_plan.batch_size_at(step) / self.batch_plan.batch_size)
        return factor

    def _phase(self, tokens: int, after: int) -> float:
        """Return the factor of the update from `tokens` to `after` tokens, for a full batch."""
        if tokens < self.warmup_end:
            return min(1.0, after / self.warmup_end)
        progress = max(0.0, (tokens - self.decay_start) / max(1, self.end - self.decay_start))  # 0 until the decay
        return COOLDOWNS[self._shape].factor(progress, self.config.final_lr_fraction)

    @property
    def _shape(self) -> str:
        """Return the name of the cooldown by which the rate falls; a constant rate never uses it."""
        own = SHAPES[self.config.name].cooldown if self.config.branch is None else None
        return own or self.config.cooldown

    def describe(self) -> str:
        """Return the phases in one line, by the steps at which they end."""
        warmup, decay, end = (
            self.batch_plan.steps_for(tokens) for tokens in (self.warmup_end, self.decay_start, self.end)
        )
        has_warmup = warmup > 0 and self.config.branch is None  # a branch begins after its parent's
        phases = [f"warm-up to step {warmup:,}"] if has_warmup else []
        if decay > warmup:
            phases.append(f"peak to step {decay:,}")
        if end > decay:
            phases.append(f"{self._shape} decay to {self.config.final_lr_fraction:g} of the peak at step {end:,}")
        return f"{self.config.name}: {', '.join(phases)}"
