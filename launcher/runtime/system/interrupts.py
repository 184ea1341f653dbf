"""Take Ctrl-C in a command: the first one ends it tidily, the second one at once, and neither with a traceback.

A handler of Python runs between two instructions of the main thread, which may be in C++ for minutes: training a
tokenizer, say. So a thread of its own reads the signals as well, which the interpreter writes down as they come.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock, Thread
from types import FrameType
from typing import NoReturn

import psutil

from plumbline.launcher.runtime.system.exit_codes import INTERRUPTED

_ending = RLock()
"""Held by who ends the process, so that the other waits until it was said; a signal of one thread comes through."""


class Interrupts:
    """Count the interrupts of this process; `interrupts` returns the one that there is."""

    def __init__(self) -> None:
        """Listen from now on, unless somebody else does, or a shell wants them ignored.

        Until `tidily` the first one already ends the process at once.
        """
        self._is_tidy = False
        self._heard = self._raised = self._answered = 0
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child hears is not for us
        signal.signal(signal.SIGINT, self._raise)
        Thread(target=self._listen, args=(reader,), daemon=True).start()

    @contextmanager
    def tidily(self) -> Iterator[None]:
        """Let the first interrupt raise KeyboardInterrupt; behind this, any ends the process without a word."""
        self._is_tidy = True
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # or the interpreter, ending, would show where it was

    def answered(self) -> None:
        """Go on after an interrupt: the next one is a first one again."""
        self._answered = self._raised  # not of what was heard: the thread may hear of one after it was answered

    def _listen(self, reader: int) -> None:
        while True:
            select.select([reader], [], [])
            self._heard += os.read(reader, 64).count(signal.SIGINT)
            if self._heard - self._answered > self._is_tidy:
                end()

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        self._raised += 1
        if self._raised - self._answered > self._is_tidy:
            end()
        raise KeyboardInterrupt


@cache
def interrupts() -> Interrupts:
    """Return what counts the interrupts of this process; the first call, in the main thread, makes it."""
    return Interrupts()


def end() -> NoReturn:
    """End this process and those that it started, whatever they are at."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    with _ending:
        os.write(2, b"error: interrupted\n")
        os._exit(INTERRUPTED)
