"""Define the interface of a guard, and how it sends a run back or ends it."""

from collections.abc import Mapping, Sequence
from typing import Any

from plumbline.launcher.runtime.engine.step_result import StepResult


class TrainingError(RuntimeError):
    """Signal that training cannot go on, for a reason in the run rather than in the code."""


class RollBack(Exception):  # noqa: N818 - a request, which is an error only if it cannot be met
    """Request to go back to a checkpoint before some steps, and to skip the data that they took.

    Args:
        guard: name of the guard.
        first: the first step that is not trusted.
        last: the last step that is not trusted.
        message: what the guard found.
    """

    def __init__(self, guard: str, first: int, last: int, message: str) -> None:
        super().__init__(message)
        self.guard, self.first, self.last, self.message = guard, first, last, message


class WrongNodeError(TrainingError):
    """Signal that nodes compute wrong numbers; the same command can continue without them.

    Args:
        message: what was found, in whole sentences; the remedy is appended.
        nodes: Slurm names of the nodes to leave out.
    """

    def __init__(self, message: str, nodes: Sequence[str]) -> None:
        super().__init__(
            f"{message} Leave the node out and start the same command again; a job under Slurm does both by itself"
        )
        self.nodes = nodes


class Guard:
    """Watch a run. A guard sees the same values on all ranks, or exchanges them, so that all ranks decide the same.

    Its state is saved and restored with each checkpoint, so what it does is a function of the step.
    """

    name: str
    """Key of its section in `guards`."""

    def before_step(self, step: int, micro_batches: int) -> None:
        """Prepare for the update that leads to `step`, from `micro_batches` micro-batches of this rank."""

    def before_update(self) -> None:
        """Check the gradients of the step passed to `before_step`, before clipping; ranks may communicate."""

    def after_update(self) -> None:
        """Check the weights after the update, before any result of the step is read; ranks may communicate."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Check the update that led to `step`, before anything is logged or saved.

        Raises:
            RollBack: the run is to go back to before some step.
        """

    def found(self, _step: int) -> dict[str, Any]:
        """Return what to log about the update that led to a step, after `after_step`; usually nothing."""
        return {}

    def before_save(self, step: int) -> None:
        """Check the weights of `step` before they are saved; ranks may communicate."""

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Check what is logged of an evaluation.

        Raises:
            TrainingError: training cannot go on.
        """

    @property
    def trusts_weights(self) -> bool:
        """Return whether the weights are worth a checkpoint at `checkpoint.interval`."""
        return True

    @property
    def state(self) -> dict[str, Any]:
        """Return the guard's state as JSON values, for `restore`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned for a checkpoint; it is empty for a new guard."""
