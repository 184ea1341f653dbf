"""Requests to stop: SIGUSR1 (Slurm, ahead of the time limit or of preemption), SIGTERM and SIGINT.

The handler only raises a flag. Ranks hear of a signal at different moments, so the loop agrees on a step with an
all-reduce of the flag, saves there, and exits with REQUEUE, which the sbatch script answers by requeueing the job.
"""

import signal
from types import FrameType

REQUEUE = 85  # exit code: "stopped on request, checkpoint written, start me again"


class StopRequest:
    """Whether this process has been asked to stop; install it before the work starts."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.signal = number

    def __bool__(self) -> bool:
        """Whether a signal arrived."""
        return self.signal is not None
