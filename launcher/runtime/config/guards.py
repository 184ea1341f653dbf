"""Declare the section of the guards (train/guards/), which watch a run: what each detects, and how it responds."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from plumbline.data.paths import HomePath


class NonFiniteConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Limit how many updates may be skipped because their gradient is not finite."""

    max_skipped: PositiveInt = 10
    """Number of skipped updates in a row after which the run goes back. It goes back at once if weights, or the loss of
    an applied update, are not finite, or if its last update is skipped."""


class SpikeConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
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


class LossSpikeConfig(SpikeConfig, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Define a spike of the training loss."""

    nats: PositiveFloat = 0.5
    """Minimum height of a spike above the median, nats per token, in addition to `deviations`."""


class GradientSpikeConfig(SpikeConfig, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Define a spike of the gradient's norm before clipping; its deviations are those of its logarithm."""

    factor: float = Field(default=8.0, gt=1.0)
    """Minimum ratio of a spike to the median, in addition to `deviations`."""


class TransferConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Choose the run with which the sizes of updates are compared."""

    base: HomePath | None = Field(default=None, min_length=1)
    """Run folder of the base model, whose sizes are expected here too. None: sizes are only logged, so that this run
    can be a base."""
    factor: float = Field(default=1.25, gt=1.0)
    """Factor by which a size may be larger or smaller than in the base run."""


class GuardsConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
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
    def spikes(self) -> dict[str, SpikeConfig]:
        """Return the sections on spikes, by name."""
        return {"loss_spike": self.loss_spike, "gradient_spike": self.gradient_spike}

    def problems(self, saves: bool) -> Iterator[str]:
        """Yield the problems of guards that are to go back.

        Args:
            saves: whether the run writes checkpoints before its end.
        """
        for name, spike in self.spikes.items():
            if spike.action == "roll_back" and not saves:
                yield (
                    f"guards.{name}.action = roll_back: there is nothing to go back to without checkpoints: set "
                    "checkpoint.interval, or warn"
                )
            if spike.action == "roll_back" and self.max_rollbacks == 0:
                yield (f"guards.{name}.action = roll_back with guards.max_rollbacks = 0: allow one, or let it warn")
