"""Append lines to a file of which every line stays whole, on a disk that may be full for a while."""

import os
from contextlib import suppress
from pathlib import Path

from plumbline.launcher.runtime.system.log import LOG


class Lines:
    """Append lines. Those that cannot be written wait in memory for the next one: a log is not worth ending a run.

    Of a line that was written in part nothing stays, or the next one would continue it and nobody could read either.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._end = self._file.tell()
        self._waiting: list[bytes] = []
        self._is_torn = False
        """Whether a part of a line may stand behind the last whole one."""

    def add(self, line: str) -> None:
        """Write a line, and those that wait; warn of the first one that has to."""
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
        except OSError as late:  # a file system in a network may only now find that it has no room
            LOG.warning(f"{self._path} may lack its last lines: {late}")

    def _write(self) -> OSError | None:
        """Write all lines that wait, or none of them; return what prevents it."""
        data = b"".join(self._waiting)
        done = 0
        try:
            if self._is_torn:
                self._mend()
            self._is_torn = True
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            with suppress(OSError):  # of a file system that is away; tried again ahead of the next line
                self._mend()
            return error
        self._is_torn = False
        self._end += len(data)
        self._waiting.clear()
        return None

    def _mend(self) -> None:
        """Drop what was written of lines in part, which takes no room."""
        os.ftruncate(self._file.fileno(), self._end)
        self._is_torn = False
