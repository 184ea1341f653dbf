"""Append lines to a file and keep every line whole, even if the disk is full for a while."""

import os
from contextlib import suppress
from pathlib import Path

from plumbline.launcher.runtime.system.log import LOG


class Lines:
    """Append lines. Lines that cannot be written wait in memory for the next one: a failing log must not end a run.

    A partly written line is removed, or the next one would continue it and both would be unreadable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._end = self._file.tell()
        self._waiting: list[bytes] = []
        self._is_torn = False
        """Whether part of a line may follow the last whole one."""

    def add(self, line: str) -> None:
        """Write a line and all waiting ones; warn when a line has to wait for the first time."""
        had_room = not self._waiting
        self._waiting.append(line.encode() + b"\n")
        error = self._write()
        if error is not None and had_room:
            LOG.warning(f"{self._path} cannot be written ({error}): lines wait in memory, and training goes on")
        elif error is None and not had_room:
            LOG.warning(f"{self._path} can be written again, and lacks nothing")

    def close(self) -> None:
        """Close the file; warn if lines are lost."""
        error = self._write()
        if error is not None:
            LOG.warning(f"{self._path} lacks its last {len(self._waiting)} lines: {error}")
        try:
            self._file.close()
        except OSError as late:  # a network file system may report a full disk only now
            LOG.warning(f"{self._path} may lack its last lines: {late}")

    def _write(self) -> OSError | None:
        """Write all waiting lines or none; return the error if there is one."""
        data = b"".join(self._waiting)
        done = 0
        try:
            if self._is_torn:
                self._mend()
            self._is_torn = True
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            with suppress(OSError):  # if the file system is unavailable; retried before the next line
                self._mend()
            return error
        self._is_torn = False
        self._end += len(data)
        self._waiting.clear()
        return None

    def _mend(self) -> None:
        """Remove a partly written line, which needs no disk space."""
        os.ftruncate(self._file.fileno(), self._end)
        self._is_torn = False
