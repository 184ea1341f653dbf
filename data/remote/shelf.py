"""Track the size of the folder of pieces and its least recently used piece, without listing it each time.

The number of bytes is kept in a file beside it, written before a file grows and after one is removed. So a kill leaves
it too high at worst, and listing the folder, which happens when nothing else is left to remove, corrects it. A number
from before the machine was booted may be older than the files and is ignored. Every method requires the lock of the
cache.
"""

import contextlib
import heapq
import math
import os
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from plumbline.data.locks import is_held, same_file

PARTIAL = ".partial"


class Shelf:
    """Track the files of one folder.

    Args:
        folder: the folder of pieces.
        account: the file that holds the number of bytes, for all processes.
    """

    def __init__(self, folder: Path, account: Path) -> None:
        self._folder, self._account = folder, account
        self._idle: list[tuple[int, str]] = []
        """A heap of (last known use, name) for each known piece."""
        self._newest = -1
        """The latest use found when the folder was listed: unknown pieces were used later."""

    def held(self) -> int:
        """Return the bytes of all files."""
        with contextlib.suppress(OSError, ValueError):
            boot, held = self._account.read_text().split()
            if boot == _boot():
                return int(held)
        return self.recount()

    def recount(self) -> int:
        """List the folder and return the bytes of all files, after removing partial ones that nobody is fetching."""
        self._idle, held = [], 0
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                partial = entry.name.endswith(PARTIAL)
                if partial and _remove_abandoned(Path(entry.path)):
                    continue
                status = entry.stat()
                held += status.st_size
                if not partial:
                    self._idle.append((status.st_mtime_ns, entry.name))
        heapq.heapify(self._idle)
        self._newest = max(self._idle, default=(-1, ""))[0]
        self._write(held)
        return held

    def grow(self, file: BinaryIO, size: int) -> None:
        """Give an open file of the folder its final size."""
        self._write(self.held() + size - os.fstat(file.fileno()).st_size)
        os.truncate(file.fileno(), size)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        held = self.held()
        with contextlib.suppress(FileNotFoundError):
            size = (self._folder / name).stat().st_size
            (self._folder / name).unlink()
            self._write(held - size)

    def unused(self, needed: Container[str]) -> Iterator[tuple[str, int]]:
        """Yield name and size of each piece that is not needed, least recently used first.

        The folder is listed again, which may correct the number of bytes, if it may hold unknown pieces.
        """
        given: set[str] = set()
        for name, size in self._known(needed, self._newest):
            given.add(name)
            yield name, size
        self.recount()
        for name, size in self._known(needed, math.inf):
            if name not in given:
                yield name, size

    def _known(self, needed: Container[str], newest: float) -> Iterator[tuple[str, int]]:
        """Yield like `unused`, but only known pieces, up to the first that was used after `newest`."""
        passed: list[tuple[int, str]] = []
        try:
            while self._idle and self._idle[0][0] <= newest:
                used, name = heapq.heappop(self._idle)
                if name in needed:
                    passed.append((used, name))
                elif found := self.look(name):
                    if found[0] != used:  # used in the meantime
                        heapq.heappush(self._idle, (found[0], name))
                        continue
                    passed.append((used, name))
                    yield name, found[1]
        finally:
            for known in passed:  # they stay known unless the caller removes them
                heapq.heappush(self._idle, known)

    def look(self, name: str) -> tuple[int, int] | None:
        """Return when a piece was last used and its size, or None if it does not exist."""
        try:
            status = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size

    def _write(self, held: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # a link there would not be ours
        with os.fdopen(os.open(self._account, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(f"{_boot()} {held}\n")


@cache
def _boot() -> str:
    """Return an identifier that changes with each boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return "unknown"


def _remove_abandoned(partial: Path) -> bool:
    """Remove a file that a dead process left; return False if a process is fetching it."""
    with partial.open("r+b") as file:
        if is_held(file.fileno()):
            return False
        if same_file(file.fileno(), partial):
            partial.unlink(missing_ok=True)
        return True
