"""Declare the section of the guards (train/guards/), which watch a run: what each detects, and how it responds."""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from plumbline.data.paths import HomePath
from plumbline.launcher.runtime.config.sections import CheckpointConfig


class NonFiniteConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Limit how many updates may be skipped because their gradient is not finite."""

    max_skipped: PositiveInt = 10
    """Number of skipped updates in a row after which the run goes back. It goes back at once if weights, or the loss of
    an applied update, are not finite, or if its last update is skipped."""


class SpikeConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Define what counts as a spike, and how to respond to one."""

    action: Literal["ignore", "warn", "roll_back"] = "warn"
    """ignore: do not look; warn: warn in the log; roll_back: go back to the last checkpoint before it and skip its data
    (docs/guards.md)."""
    window: int = Field(default=128, ge=8)
    """Number of applied updates before a step that define what is usual. There is no alarm before that many, nor in the
    warm-up of the learning rate."""
    deviations: PositiveFloat = 8.0
    """Robust standard deviations (1.4826 times the median distance from the median) above the median that count as a
    spike."""
    look_back: NonNegativeInt = 2
    """For roll_back: steps before a spike whose data is skipped too, because they may be its cause."""


class LossSpikeConfig(SpikeConfig, extra="forbid", frozen=True, strict=True):
    """Define a spike of the training loss."""

    nats: PositiveFloat = 0.5
    """Minimum height of a spike above the median, nats per token, in addition to `deviations`."""


class GradientSpikeConfig(SpikeConfig, extra="forbid", frozen=True, strict=True):
    """Define a spike of the gradient's norm before clipping; its deviations are those of its logarithm."""

    factor: float = Field(default=8.0, gt=1.0)
    """Minimum ratio of a spike to the median, in addition to `deviations`."""


class TransferConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Choose the run with which the sizes of updates are compared."""

    base: HomePath | None = Field(default=None, min_length=1)
    """Run folder of the base model, whose sizes are expected here too. None: sizes are only logged, so that this run
    can be a base."""
    factor: float = Field(default=1.25, gt=1.0)
    """Factor by which a size may be larger or smaller than in the base run."""


class GuardsConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure the guards of a run, and how often it may go back (docs/guards.md)."""

    max_rollbacks: NonNegativeInt = 3
    """How often a run may go back to a checkpoint, over all its starts. One more request ends the run with exit code 3.
    0: the first request ends it."""
    non_finite: NonFiniteConfig = NonFiniteConfig()
    """Gradients, losses and weights that are not finite."""
    loss_spike: LossSpikeConfig = LossSpikeConfig()
    """A training loss far above those of the steps before."""
    gradient_spike: GradientSpikeConfig = GradientSpikeConfig()
    """A gradient norm far above those of the steps before."""

    replica_interval: PositiveInt | None = Field(default=100, json_schema_extra={"shapes": "nothing"})
    """Steps between comparisons of what all ranks keep whole: weights that differ end the run (docs/replicas.md). None:
    only before each checkpoint."""
    replay_interval: PositiveInt | None = Field(default=None, json_schema_extra={"shapes": "nothing"})
    """Steps between micro-batches of each rank that another rank computes too: different bits end the run before the
    update, and name the node (docs/replicas.md). It needs run.deterministic and ZeRO stage 0, 1 or 2. None: never."""
    transfer: TransferConfig = Field(default=TransferConfig(), json_schema_extra={"shapes": "nothing"})
    """Sizes of updates by role, relative to those implied by the optimizer: a warning if the parameterization's table
    is not in force (docs/guards.md)."""

    @property
    def _rolling_back(self) -> dict[str, SpikeConfig]:
        """Return the sections on spikes after which the run goes back, by name."""
        spikes: dict[str, SpikeConfig] = {"loss_spike": self.loss_spike, "gradient_spike": self.gradient_spike}
        return {name: spike for name, spike in spikes.items() if spike.action == "roll_back"}

    def problems(self, saves: CheckpointConfig) -> Iterator[str]:
        """Yield what keeps a run from going back after a spike, whenever it occurs.

        Args:
            saves: the run's section on checkpoints.
        """
        for name, spike in self._rolling_back.items():
            if saves.interval is None and saves.local is None:
                yield (
                    f"guards.{name}.action = roll_back: there is nothing to go back to without checkpoints: set "
                    "checkpoint.interval, or warn"
                )
            if self.max_rollbacks == 0:
                yield f"guards.{name}.action = roll_back with guards.max_rollbacks = 0: allow one, or let it warn"
            if saves.interval is not None and saves.keep_every is None and _reach(saves) < spike.look_back:
                yield (
                    f"guards.{name}.look_back = {spike.look_back}: all checkpoints that stay (checkpoint.keep_last = "
                    f"{saves.keep_last}, checkpoint.interval = {saves.interval}) may be of steps before a spike that "
                    f"are not trusted: set checkpoint.keep_last={1 + math.ceil(spike.look_back / saves.interval)}"
                )

    def cautions(self, saves: CheckpointConfig, steps: int) -> Iterator[str]:
        """Yield cases, other than the `problems`, in which there may be no checkpoint to go back to after a spike.

        Args:
            saves: the run's section on checkpoints, of which there are no `problems`.
            steps: how many steps the run takes.
        """
        for name, spike in self._rolling_back.items():
            if saves.local is None and saves.interval is not None and saves.interval >= steps:
                yield (
                    f"guards.{name}.action = roll_back: checkpoint.interval = {saves.interval}, and the run has "
                    f"{steps} steps: there is nothing to go back to; lower it"
                )
            elif _reach(saves) < spike.look_back:
                if saves.interval is None:
                    kept, remedy = "the one checkpoint of checkpoint.local", "set checkpoint.interval as well"
                else:
                    assert saves.keep_every is not None, "without it this is one of the problems"
                    first = math.lcm(saves.interval, saves.keep_every)  # that stays
                    kept = f"before step {first + spike.look_back} the {saves.keep_last} of checkpoint.keep_last"
                    remedy = "raise that"
                yield (
                    f"guards.{name}.look_back = {spike.look_back}: {kept} may be of steps before a spike that are not "
                    f"trusted, and the run then ends; {remedy}"
                )


def _reach(saves: CheckpointConfig) -> float:
    """Return the largest `look_back` that surely leaves a checkpoint to go back to, once `keep_last` were saved.

    The newest one may be of the step just before a spike.
    """
    if saves.interval is None:  # checkpoint.local keeps one
        return 0
    if saves.keep_every is not None and saves.interval % saves.keep_every == 0:  # all stay
        return math.inf
    return (saves.keep_last - 1) * saves.interval
