"""Handle requests to stop: SIGUSR1 (Slurm, before a time limit or preemption), SIGTERM, SIGINT, SIGHUP, dead launchers.

The handler only sets a flag. Ranks receive a signal at different times, so the loop agrees on a step with an all-reduce
of the flag, saves there, and exits with REQUEUE, after which the sbatch script requeues the job. Before the first step
there is nothing to save: until then the process ends at once, whatever it is doing.

`deepspeed` is two processes, and the outer one does not forward signals; neither does a killed launcher. So each rank
also checks whether its launchers still exist whenever the request is read.
"""

import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, Thread
from types import FrameType
from typing import NoReturn

import psutil

from plumbline.launcher.runtime.system.exit_codes import INTERRUPTED, REQUEUE
from plumbline.launcher.runtime.system.log import LOG

LAUNCHERS = {
    "deepspeed",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
}
MODULE, WITH_A_WORD = re.compile("-[^-mWX]*m"), re.compile("-[^-mWX]*[WX]")
"""Options of Python, perhaps after other one-letter options, that a module to run follows, or an argument."""
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_SECONDS = 1.0  # between checks of the launchers
SET_BY_LAUNCHERS = ("CROSS_SIZE", "TORCHELASTIC_RUN_ID")  # by deepspeed and torchrun in the environment of each rank


class StopRequest:
    """Record whether this process was asked to stop; install it before the work starts."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.step_seconds = 0.0
        """Current seconds per step, set by the loop."""
        self.save_seconds = 0.0
        """Seconds of the longest save."""
        self.tell: Callable[[int, str], object] | None = None
        """Called with exit code and reason before the process ends at once."""
        self._why: str | None = None
        self._deferred = self._listens = False
        self._lock = Lock()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it ignored
                signal.signal(number, self._receive)
        self._launchers = _launchers()
        self._orphaned, self._next_look = False, 0.0

    @property
    def takes(self) -> float:
        """Return the seconds that a stop may take: two steps, the save in progress, and another."""
        return 2 * self.step_seconds + 2 * self.save_seconds

    def ask(self, why: str) -> None:
        """Request a stop from within this process, from any thread; `why` is a phrase to follow "stopped"."""
        self._why = why

    def end_at_once(self, at_second_interrupt: bool = False) -> None:
        """End the process with REQUEUE at a signal, or when a launcher dies, from now until `defer`.

        Python handlers run between two instructions of the main thread, which may be waiting for other ranks in C++
        for half an hour. So a separate thread reads the signals, which the interpreter writes to a pipe as they arrive.

        Args:
            at_second_interrupt: end it with INTERRUPTED at a second interrupt, also after `defer`, wherever the main
                thread is. Else that raises a KeyboardInterrupt there, which a process with children has to clean up at.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # one Ctrl-C would count as several
        self._listens = at_second_interrupt
        Thread(target=self._listen, args=(reader,), daemon=True).start()

    def defer(self) -> None:
        """Stop ending the process at once: from here on there is something to save, and the loop handles requests."""
        with self._lock:
            self._deferred = True

    def end_if_asked(self) -> None:
        """End the process with REQUEUE if a stop was requested before `defer`.

        For an error: the other ranks, asked to stop as well, may have left this one before its thread read the signal.
        """
        if not self._deferred and (self.signal is not None or self.is_orphaned):
            self._end_before_training()

    def _end_before_training(self) -> None:
        with self._lock:  # else `defer` could return, and training begin, during the end
            if not self._deferred:
                LOG.info(f"stopped {self.reason} before the first step, with nothing to save; start it again")
                self._end(REQUEUE, f"stopped {self.reason} before the first step")

    def _listen(self, reader: int) -> None:
        interrupts = 0
        while self._listens or not self._deferred:
            heard = select.select([reader], [], [], None if self._deferred else LOOK_SECONDS)[0]
            numbers = os.read(reader, 64) if heard else b""
            interrupts += numbers.count(signal.SIGINT)
            if set(numbers) & set(SIGNALS):
                self._end_before_training()
            self.end_if_asked()
            if self._listens and interrupts > 1:
                LOG.error("interrupted")
                self._end(INTERRUPTED, "interrupted")

    def _end(self, code: int, why: str) -> NoReturn:
        if self.tell is not None:
            self.tell(code, why)
        os._exit(code)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT and not self._listens:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.signal = number

    def __bool__(self) -> bool:
        """Return whether a signal arrived, this process requested a stop itself, or one of its launchers died."""
        return self.signal is not None or self._why is not None or self.is_orphaned

    @property
    def reason(self) -> str:
        """Return the reason to stop, as a phrase to follow "stopped"."""
        if self._why is not None:
            return self._why
        # Ctrl-C goes to the launcher as well, which may be gone by the time that the run has saved
        return "because its launcher is gone" if self.signal is None and self.is_orphaned else "on request"

    @property
    def is_orphaned(self) -> bool:
        """Return whether a launcher of this process died; checked once in LOOK_SECONDS, since steps may be short."""
        if not self._orphaned and time.monotonic() >= self._next_look:
            self._orphaned = self._has_lost_a_launcher()
            self._next_look = time.monotonic() + LOOK_SECONDS
        return self._orphaned

    def _has_lost_a_launcher(self) -> bool:
        if not self._launchers:  # there is none, or it died before we looked
            return os.getppid() == 1 and any(name in os.environ for name in SET_BY_LAUNCHERS)
        # Compare parents instead of checking that the launcher exists: a dead one does until it is waited for
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
    """Return the ancestors of this process, parent first, up to the outermost launcher, including wrappers in between.

    Others that start ranks, such as a shell, may end before them.
    """
    ancestors = psutil.Process().parents()
    outermost = max((number for number, process in enumerate(ancestors, start=1) if _is_launcher(process)), default=0)
    return ancestors[:outermost]


def _is_launcher(process: psutil.Process) -> bool:
    """Return whether a process is a launcher of ranks, by its command line."""
    try:
        words = process.cmdline()
    except psutil.Error:  # it has just ended, or we may not see its command line
        return False
    return any(Path(word).name in LAUNCHERS for word in (*words[:1], _program(words[1:])))


def _program(words: Sequence[str]) -> str:
    """Return the script or module that Python or a shell runs, given the words after its name."""
    left = iter(words)
    for word in left:
        if MODULE.fullmatch(word):
            return next(left, "")
        if WITH_A_WORD.fullmatch(word):
            next(left, None)
        elif not word.startswith("-"):
            return word
    return ""
