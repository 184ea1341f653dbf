"""Know how many bytes the folder of pieces holds, and what in it is unused the longest, without listing it each time.

The bytes stand in a file beside it. It is written before a file grows and after one is removed, so that a kill leaves
it too high at worst: listing the folder, which is done when nothing else is left to remove, sets it right. One from
before the machine was started may be older than the files, and counts for nothing. Every method wants the lock of the
cache to be held.
"""

import contextlib
import heapq
import math
import os
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from plumbline.data.locks import is_held
from plumbline.data.remote.plans import same_file

PARTIAL = ".partial"


class Shelf:
    """Account for the files of one folder.

    Args:
        folder: of the pieces.
        account: where to keep the number of bytes, for all processes.
    """

    def __init__(self, folder: Path, account: Path) -> None:
        self._folder, self._account = folder, account
        self._idle: list[tuple[int, str]] = []
        """A heap: when it was used last, as far as we know, and the name of each piece that we know."""
        self._newest = -1
        """When the last was used before we listed the folder: what we do not know was used later."""

    def held(self) -> int:
        """Return the bytes of all files."""
        with contextlib.suppress(OSError, ValueError):
            boot, held = self._account.read_text().split()
            if boot == _boot():
                return int(held)
        return self.recount()

    def recount(self) -> int:
        """List the folder; returns the bytes of all files, without those that arrived in part and nobody fetches."""
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
        """Give an open file of the folder the size that it will have."""
        self._write(self.held() + size - os.fstat(file.fileno()).st_size)
        os.truncate(file.fileno(), size)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        held = self.held()
        with contextlib.suppress(FileNotFoundError):
            size = (self._folder / name).stat().st_size
            (self._folder / name).unlink()
            self._write(held - size)

    def unused(self, needed: Container[str]) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of each piece that is not needed, the longest unused first.

        The folder is listed, and the bytes may be others then, where it may hold what we do not know.
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
        """Yield as `unused` of the pieces that we know, up to the first that was used after `newest`."""
        passed: list[tuple[int, str]] = []
        try:
            while self._idle and self._idle[0][0] <= newest:
                used, name = heapq.heappop(self._idle)
                if name in needed:
                    passed.append((used, name))
                elif found := self.look(name):
                    if found[0] != used:  # used since
                        heapq.heappush(self._idle, (found[0], name))
                        continue
                    passed.append((used, name))
                    yield name, found[1]
        finally:
            for known in passed:  # they stay, unless who asked removes them
                heapq.heappush(self._idle, known)

    def look(self, name: str) -> tuple[int, int] | None:
        """Return when a piece was used last and its bytes; None if it is not there."""
        try:
            status = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size

    def _write(self, held: int) -> None:
        self._account.write_text(f"{_boot()} {held}\n")


@cache
def _boot() -> str:
    """Return what is another after each start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return "unknown"


def _remove_abandoned(partial: Path) -> bool:
    """Remove a file that a dead process left; False if somebody fetches it."""
    with partial.open("r+b") as file:
        if is_held(file.fileno()):
            return False
        if same_file(file.fileno(), partial):
            partial.unlink(missing_ok=True)
        return True
