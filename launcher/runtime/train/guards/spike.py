"""Warn of a loss or a gradient far above those of the steps before, or send the run back to before it.

What is usual is the median of the last `window` applied updates, and how much it varies their median absolute
deviation, which spikes among them do not move. A level that stays, as that of another mixture, is usual after half a
window.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.config.guards import GradientSpikeConfig, LossSpikeConfig, SpikeConfig
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.outliers import usual_range
from plumbline.launcher.runtime.train.guards.guard import Guard, RollBack


class Spike(Guard, ABC):
    """Watch one number of every applied update.

    Args:
        settings: what is a spike, and what is done about one.
        least: how far above the median one is at least, in the unit of `value`.
        quiet_steps: at the beginning, in which nothing is one: the warm-up.
    """

    def __init__(self, settings: SpikeConfig, least: float, quiet_steps: int) -> None:
        self.settings, self.least, self.quiet_steps = settings, least, quiet_steps
        self.window: deque[float] = deque(maxlen=settings.window)
        self.inside = False  # a spike that lasts is one

    @abstractmethod
    def value(self, result: StepResult) -> float:
        """Return the number, in a unit in which its noise is alike above and below; not finite where there is none."""

    @abstractmethod
    def describe(self, value: float, usual: float) -> str:
        """Say what was seen."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Compare the number with those of the updates before; what was skipped has none."""
        value = self.value(result)
        if not (result.applied and math.isfinite(value)):
            return
        if len(self.window) == self.settings.window and step > self.quiet_steps:
            usual, limit = usual_range(self.window, self.settings.deviations, self.least)
            if value > limit and not self.inside:
                self._act(step, self.describe(value, usual))
            self.inside = value > limit
        self.window.append(value)

    def _act(self, step: int, message: str) -> None:
        if self.settings.action == "roll_back":
            raise RollBack(self.name, max(1, step - self.settings.look_back), step, message)
        LOG.warning(f"step {step}: {message} (guards.{self.name})")

    @property
    def state(self) -> dict[str, Any]:
        """Return the window, and whether the last update was a spike."""
        return {"window": list(self.window), "inside": self.inside}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the newest of the window."""
        self.window = deque(map(float, state.get("window", ())), maxlen=self.settings.window)
        self.inside = state.get("inside", False)


class LossSpike(Spike):
    """Watch the training loss."""

    name = "loss_spike"

    def __init__(self, settings: LossSpikeConfig, quiet_steps: int) -> None:
        super().__init__(settings, settings.nats, quiet_steps)

    def value(self, result: StepResult) -> float:
        """Return the loss, nats."""
        return float(result.loss.item())

    def describe(self, value: float, usual: float) -> str:
        """Say what was seen."""
        return f"the loss is {value:.4f} after a median of {usual:.4f}"


class GradientSpike(Spike):
    """Watch the gradient's norm before clipping, by its logarithm."""

    name = "gradient_spike"

    def __init__(self, settings: GradientSpikeConfig, quiet_steps: int) -> None:
        super().__init__(settings, math.log(settings.factor), quiet_steps)

    def value(self, result: StepResult) -> float:
        """Return the logarithm of the norm."""
        return math.log(result.grad_norm) if result.grad_norm > 0 else -math.inf

    def describe(self, value: float, usual: float) -> str:
        """Say what was seen."""
        return f"the gradient norm is {math.exp(value):.4g} after a median of {math.exp(usual):.4g}"
