"""Declare the section of the guards, which watch a run (train/guards/): what each looks for, and what it does then."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from plumbline.data.paths import HomePath


class NonFiniteConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say how many updates may be skipped because their gradient is not finite."""

    max_skipped: PositiveInt = 10
    """So many in a row, after which the run goes back. Weights, or the loss of an applied update, that are not finite
    send it back at once, as does a skipped update at its end."""


class SpikeConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say what is a spike, and what is done about one."""

    action: Literal["ignore", "warn", "roll_back"] = "warn"
    """ignore: do not look; warn: say so in the log; roll_back: go back to the last checkpoint before it and leave its
    data out (docs/guards.md)."""
    window: int = Field(default=128, ge=8)
    """Applied updates before a step, which say what is usual. There is no alarm before so many, nor in the warm-up of
    the learning rate."""
    deviations: PositiveFloat = 8.0
    """Robust standard deviations (1.4826 times the median distance from the median) above the median that are one."""
    look_back: NonNegativeInt = 2
    """Of roll_back: steps before a spike whose data is left out with that of the spike, for they may be its cause."""


class LossSpikeConfig(SpikeConfig, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say what is a spike of the training loss."""

    nats: PositiveFloat = 0.5
    """And at least so far above the median."""


class GradientSpikeConfig(SpikeConfig, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say what is a spike of the gradient's norm before clipping; its deviations are those of its logarithm."""

    factor: float = Field(default=8.0, gt=1.0)
    """And at least so many times the median."""


class TransferConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say with which run the sizes of updates are compared."""

    base: HomePath | None = Field(default=None, min_length=1)
    """Run folder of the base model, whose sizes are expected here as well. None: sizes are logged, so that this run can
    be a base."""
    factor: float = Field(default=1.25, gt=1.0)
    """Times larger or smaller than in the base run that a size may be."""


class GuardsConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say what watches a run, and how often it may go back (docs/guards.md)."""

    max_rollbacks: NonNegativeInt = 3
    """How often a run may go back to a checkpoint, over all its starts. What asks for it once more ends the run with
    exit code 3. 0: the first time."""
    non_finite: NonFiniteConfig = NonFiniteConfig()
    """Gradients, losses and weights that are not finite."""
    loss_spike: LossSpikeConfig = LossSpikeConfig()
    """A training loss far above those of the steps before."""
    gradient_spike: GradientSpikeConfig = GradientSpikeConfig()
    """A gradient norm far above those of the steps before."""

    replica_interval: PositiveInt | None = Field(default=100, json_schema_extra={"shapes": "nothing"})
    """Steps from one comparison of what all ranks keep whole to the next: weights that differ end the run
    (docs/replicas.md). None: only before each checkpoint."""
    replay_interval: PositiveInt | None = Field(default=None, json_schema_extra={"shapes": "nothing"})
    """Steps from one micro-batch of each rank that another rank computes as well to the next: other bits end the run
    before its update, and name the node (docs/replicas.md). It needs run.deterministic and ZeRO stage 0, 1 or 2. None:
    never."""
    transfer: TransferConfig = Field(default=TransferConfig(), json_schema_extra={"shapes": "nothing"})
    """Sizes of updates by role, over what the optimizer asks for: a warning where the table of the parameterization is
    not in force (docs/guards.md)."""

    @property
    def spikes(self) -> dict[str, SpikeConfig]:
        """Return what is looked at for spikes, by the name of its section."""
        return {"loss_spike": self.loss_spike, "gradient_spike": self.gradient_spike}

    def problems(self, saves: bool) -> Iterator[str]:
        """Yield what stands in the way of a guard that is to go back.

        Args:
            saves: whether the run writes checkpoints on its way.
        """
        for name, spike in self.spikes.items():
            if spike.action == "roll_back" and not saves:
                yield (
                    f"guards.{name}.action = roll_back: there is nothing to go back to without checkpoints: set "
                    "checkpoint.interval, or warn"
                )
            if spike.action == "roll_back" and self.max_rollbacks == 0:
                yield (f"guards.{name}.action = roll_back with guards.max_rollbacks = 0: allow one, or let it warn")
