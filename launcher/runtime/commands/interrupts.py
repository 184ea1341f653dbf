"""Handle Ctrl-C in a command: the first ends it cleanly, the second at once, and neither with a traceback.

A Python handler runs between two instructions of the main thread, which may be in C++ for minutes, for example to train
a tokenizer. So a separate thread also reads the signals, which the interpreter writes to a pipe as they arrive.
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
"""Held by the thread that ends the process, so that another waits until the message is out; reentrant for signals."""


class Interrupts:
    """Count the interrupts of this process; `interrupts` returns the only instance."""

    def __init__(self) -> None:
        """Listen from now on, unless other code does, or a shell has them ignored.

        Before `tidily`, the first interrupt already ends the process at once.
        """
        self._is_tidy = False
        self._heard = self._raised = self._answered = 0
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not ours
        signal.signal(signal.SIGINT, self._raise)
        Thread(target=self._listen, args=(reader,), daemon=True).start()

    @contextmanager
    def tidily(self) -> Iterator[None]:
        """Let the first interrupt raise KeyboardInterrupt; after this context, any ends the process silently."""
        self._is_tidy = True
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # else the interpreter prints a traceback at exit

    def answered(self) -> None:
        """Continue after an interrupt: the next one counts as the first again."""
        self._answered = self._raised  # the raised ones: the thread may read one only after it was answered

    @property
    def is_raised(self) -> bool:
        """Return whether an interrupt was raised that no code has answered."""
        return self._raised > self._answered

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
    """Return the counter of this process's interrupts; the first call, in the main thread, creates it."""
    return Interrupts()


def end() -> NoReturn:
    """End this process and those that it started, whatever they are doing."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    with _ending:
        os.write(2, b"error: interrupted\n")
        os._exit(INTERRUPTED)
