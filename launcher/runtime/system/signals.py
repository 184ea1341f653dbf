"""Take requests to stop: SIGUSR1 (Slurm, before the time limit or a preemption), SIGTERM, SIGINT, a dead launcher.

The handler only raises a flag. Ranks hear of a signal at different moments, so the loop agrees on a step with an
all-reduce of the flag, saves there, and exits with REQUEUE, which the sbatch script answers by requeueing the job.

`deepspeed` is two processes, and the outer one passes no signal on; a launcher that is killed outright passes none
either. So each rank also looks, whenever it is asked, whether its launchers are still there.
"""

import os
import signal
from pathlib import Path
from types import FrameType

import psutil

LAUNCHERS = {
    "deepspeed",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
}
SET_BY_LAUNCHERS = ("CROSS_SIZE", "TORCHELASTIC_RUN_ID")  # by deepspeed and torchrun in the environment of each rank


class StopRequest:
    """Tell whether this process has been asked to stop; install it before the work starts."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)
        self._launchers = _launchers()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.signal = number

    def __bool__(self) -> bool:
        """Return whether a signal arrived, or a launcher of this process died."""
        return self.signal is not None or self.is_orphaned

    @property
    def is_orphaned(self) -> bool:
        """Return whether a launcher of this process died."""
        if not self._launchers:  # there is none, or it died before we looked for it
            return os.getppid() == 1 and any(name in os.environ for name in SET_BY_LAUNCHERS)
        # Compare parents instead of asking whether the launcher exists: a dead one does until somebody waits for it
        child = psutil.Process()
        for launcher in self._launchers:
            try:
                if child.ppid() != launcher.pid:
                    return True
            except psutil.NoSuchProcess:
                return True
            child = launcher
        return False


def _launchers() -> list[psutil.Process]:
    """Return the ancestors of this process, parent first, up to the outermost launcher; wrappers in between count.

    Whoever else starts ranks, a shell for example, may leave them to themselves.
    """
    ancestors = psutil.Process().parents()
    outermost = max((number for number, process in enumerate(ancestors, start=1) if _is_launcher(process)), default=0)
    return ancestors[:outermost]


def _is_launcher(process: psutil.Process) -> bool:
    """Return whether a process is a launcher of ranks, by the first words of its command line."""
    try:
        return any(Path(word).name in LAUNCHERS for word in process.cmdline()[:4])
    except psutil.Error:  # it ended while we looked, or its command line is not ours to see
        return False
