"""Define what a guard is asked, and how it sends a run back or ends it."""

from collections.abc import Mapping, Sequence
from typing import Any

from plumbline.launcher.runtime.engine.step_result import StepResult


class TrainingError(RuntimeError):
    """Say why training cannot go on, for a reason in the run rather than in the code."""


class RollBack(Exception):  # noqa: N818 - it asks for something, and is an error only where that cannot be had
    """Ask to go back to a checkpoint before some steps, and to leave out the data that they took.

    Args:
        guard: who asks.
        first: the first step that is not trusted.
        last: the last one.
        message: what was seen.
    """

    def __init__(self, guard: str, first: int, last: int, message: str) -> None:
        super().__init__(message)
        self.guard, self.first, self.last, self.message = guard, first, last, message


class WrongNodeError(TrainingError):
    """Say that nodes compute wrong numbers, without which the same command can go on.

    Args:
        message: what was found, in whole sentences; what to do follows.
        nodes: to leave out, by the names that Slurm has for them.
    """

    def __init__(self, message: str, nodes: Sequence[str]) -> None:
        super().__init__(
            f"{message} Leave the node out and start the same command again; a job under Slurm does both by itself"
        )
        self.nodes = nodes


class Guard:
    """Watch a run. A guard is shown the same on all ranks, or asks the others, so that all come to the same end.

    What it remembers is saved with each checkpoint and comes back with it, so what it does is a function of the step.
    """

    name: str
    """Key of its section in `guards`."""

    def before_step(self, step: int, micro_batches: int) -> None:
        """Prepare for the update that will make `step`, from so many micro-batches of this rank."""

    def before_update(self) -> None:
        """Look at the gradients of the step that `before_step` named, not clipped yet; ranks may exchange something."""

    def after_update(self) -> None:
        """Look at the weights that came of it, before anything is read of the step; ranks may exchange something."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Look at the update that made `step`, before anything is logged or saved.

        Raises:
            RollBack: the run is to go back to before some step.
        """

    def found(self, _step: int) -> dict[str, Any]:
        """Return what is to be logged of the update that made a step, which `after_step` has seen; mostly nothing."""
        return {}

    def before_save(self, step: int) -> None:
        """Look at the weights of `step` before they are saved; ranks may exchange something."""

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """Look at what is logged of an evaluation.

        Raises:
            TrainingError: there is nothing to go on with.
        """

    @property
    def trusts_weights(self) -> bool:
        """Return whether the weights are worth a checkpoint at `checkpoint.interval`."""
        return True

    @property
    def state(self) -> dict[str, Any]:
        """Return what it remembers, as JSON has it; `restore` takes it back."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember what `state` said when a checkpoint was written; an empty one is of a guard that is new."""
