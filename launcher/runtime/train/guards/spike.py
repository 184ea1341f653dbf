"""Warn of a loss or a gradient far above those of the steps before, or send the run back to before it.

The usual value is the median of the last `window` applied updates, and its spread their median absolute deviation,
neither of which spikes affect much. A lasting new level, as after a change of mixture, is usual after half a window.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.config.guards import GradientSpikeConfig, LossSpikeConfig, SpikeConfig
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.run.outliers import usual_range
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.guard import Guard, RollBack


class Spike(Guard, ABC):
    """Watch one number of every applied update.

    Args:
        settings: what counts as a spike, and what to do about one.
        least: smallest height of a spike above the median, in the unit of `value`.
        quiet_steps: steps at the beginning in which nothing counts as a spike: the warm-up.
    """

    def __init__(self, settings: SpikeConfig, least: float, quiet_steps: int) -> None:
        self.settings, self.least, self.quiet_steps = settings, least, quiet_steps
        self.window: deque[float] = deque(maxlen=settings.window)
        self.inside = False  # a spike of several steps counts once

    @abstractmethod
    def value(self, result: StepResult) -> float:
        """Return the number, on a scale on which its noise is symmetric; not finite if there is none."""

    @abstractmethod
    def describe(self, value: float, usual: float) -> str:
        """Return a message about what was seen."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Compare the number with those of earlier updates; a skipped update has none."""
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
        """Restore the newest values of the window."""
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
        """Return a message about what was seen."""
        return f"the loss is {value:.4f} after a median of {usual:.4f}"


class GradientSpike(Spike):
    """Watch the logarithm of the gradient's norm before clipping."""

    name = "gradient_spike"

    def __init__(self, settings: GradientSpikeConfig, quiet_steps: int) -> None:
        super().__init__(settings, math.log(settings.factor), quiet_steps)

    def value(self, result: StepResult) -> float:
        """Return the logarithm of the norm."""
        return math.log(result.grad_norm) if result.grad_norm > 0 else -math.inf

    def describe(self, value: float, usual: float) -> str:
        """Return a message about what was seen."""
        return f"the gradient norm is {math.exp(value):.4g} after a median of {math.exp(usual):.4g}"
