"""End a run whose gradient, loss or weights are not finite; single updates that were skipped are a warning."""

import math
from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.engine.step_result import StepResult
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.train.guards.guard import Guard, TrainingError

MAX_SKIPPED = 10  # consecutive updates with a non-finite gradient before the run is called broken
REMEDY = "Lower optimizer.lr, lengthen schedule.warmup, or look at the data of this step"


class NonFinite(Guard):
    """Watch for nan and inf.

    Args:
        total_steps: of the run, whose end may not be amid skipped updates.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.skipped = 0  # consecutive updates that were not applied

    def after_step(self, step: int, result: StepResult) -> None:
        """Count skipped updates, and look at the gradient of an applied one."""
        self.skipped = 0 if result.applied else self.skipped + 1
        broken_weights = result.applied and not math.isfinite(result.grad_norm)
        ends_skipping = self.skipped > 0 and step == self.total_steps
        if broken_weights or ends_skipping or self.skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"step {step}: the gradient norm is {result.grad_norm} (loss {result.loss.item():.4f}), "
                f"{self.skipped} update(s) in a row were skipped; the last checkpoint is from before. {REMEDY}"
            )
        if not result.applied:
            LOG.warning(f"step {step}: gradient norm {result.grad_norm}, update skipped")

    def after_logging(self, record: Mapping[str, Any]) -> None:
        """Look at the loss of an update that was applied."""
        if not self.skipped and not math.isfinite(record["loss"]):
            raise TrainingError(
                f"step {record['step']}: the loss is {record['loss']}; the last checkpoint is from before. {REMEDY}"
            )

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Look at the held-out losses of the final model; before the end, the next gradient tells as well."""
        losses = {key: value for key, value in record.items() if key.endswith("loss")}
        broken = [f"{key} is {value}" for key, value in losses.items() if not math.isfinite(value)]
        if broken and record["step"] == self.total_steps:
            raise TrainingError(
                f"step {record['step']}: {', '.join(broken)}: the last update broke the model, and its checkpoint "
                f"is of no use; remove it to go on from an earlier one. {REMEDY}"
            )

    @property
    def trusts_weights(self) -> bool:
        """Return whether the last update was applied: if this is the end, the last checkpoint is from before."""
        return self.skipped == 0
