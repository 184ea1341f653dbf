"""Send a run back if its gradient, loss or weights are not finite; warn of single skipped updates."""

import math
from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.config.guards import NonFiniteConfig
from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.guard import Guard, RollBack, TrainingError

REMEDY = "Lower optimizer.lr, lengthen schedule.warmup, or look at the data of this step"


class NonFinite(Guard):
    """Watch for nan and inf.

    Args:
        settings: how many skipped updates are too many.
        total_steps: of the run, whose last update may not be a skipped one.
    """

    name = "non_finite"

    def __init__(self, settings: NonFiniteConfig, total_steps: int) -> None:
        self.max_skipped, self.total_steps = settings.max_skipped, total_steps
        self.skipped = 0  # consecutive updates that were not applied

    def after_step(self, step: int, result: StepResult) -> None:
        """Count skipped updates, and check the gradient and loss of an applied one."""
        self.skipped = 0 if result.applied else self.skipped + 1
        loss = result.loss.item()
        broken = result.applied and not (math.isfinite(result.grad_norm) and math.isfinite(loss))
        ends_skipping = self.skipped > 0 and step == self.total_steps
        if broken or ends_skipping or self.skipped >= self.max_skipped:
            raise RollBack(
                self.name,
                first=step - max(self.skipped, 1) + 1,
                last=step,
                message=f"the gradient norm is {result.grad_norm} (loss {loss:.4f}), {self.skipped} update(s) in a row "
                "were skipped",
            )
        if not result.applied:
            LOG.warning(f"step {step}: gradient norm {result.grad_norm}, update skipped")

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Check the held-out losses of the final model; before the end, the next gradient shows problems too."""
        losses = {key: value for key, value in record.items() if key.endswith("loss")}
        broken = [f"{key} is {value}" for key, value in losses.items() if not math.isfinite(value)]
        if broken and record["step"] == self.total_steps:
            raise TrainingError(
                f"step {record['step']}: {', '.join(broken)}: the last update broke the model, and its checkpoint "
                f"is of no use; remove it to go on from an earlier one. {REMEDY}"
            )

    @property
    def trusts_weights(self) -> bool:
        """Return whether the last update was applied, so that no checkpoint is from amid skipped updates."""
        return self.skipped == 0

    @property
    def state(self) -> dict[str, Any]:
        """Return the number of skipped updates in a row, which is saved if the run is asked to stop among them."""
        return {"skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the count of skipped updates."""
        self.skipped = int(state.get("skipped", 0))
