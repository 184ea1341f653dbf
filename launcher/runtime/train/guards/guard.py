"""Define what a guard is asked, and how it ends a run."""

from collections.abc import Mapping
from typing import Any

from plumbline.launcher.runtime.engine.step_result import StepResult


class TrainingError(RuntimeError):
    """Say why training cannot go on, for a reason in the run rather than in the code."""


class Guard:
    """Watch a run. What a guard is shown is the same on all ranks, so all come to the same end.

    Every method may raise TrainingError.
    """

    def after_step(self, step: int, result: StepResult) -> None:
        """Look at the update that made `step`, before anything is logged or saved."""

    def after_logging(self, record: Mapping[str, Any]) -> None:
        """Look at what is logged of a step, at every `train.log_interval`."""

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Look at what is logged of an evaluation."""

    @property
    def trusts_weights(self) -> bool:
        """Return whether the weights are worth a checkpoint at `checkpoint.interval`."""
        return True
