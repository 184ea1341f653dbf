"""Let processes that share a cache know what each of them will read next, so that the least urgent is given up.

Each has a file, locked as long as it lives: one line for each piece, with the steps until it is needed. A file that
nobody holds is of a process that is gone, and is removed.
"""

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from plumbline.data.locks import is_held, wait_for

KEY = "data.cache.path"
"""Key of the configuration that decides where plans and pieces lie."""


class Plan:
    """Tell what this process needs next."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        needs_of_all(folder)  # removes what dead processes left
        self._path = folder / uuid.uuid4().hex
        while True:
            self._file = self._path.open("w", encoding="utf-8")
            wait_for(self._file, KEY, folder.parent)
            if same_file(self._file.fileno(), self._path):
                break
            self._file.close()  # taken for a dead process's before it was locked

    def write(self, needs: Mapping[str, int]) -> None:
        """Replace what was told: key of a piece -> steps until it is needed."""
        text = "".join(f"{key} {steps}\n" for key, steps in needs.items())
        # In place, for the sake of the lock: who reads meanwhile may see a part, and judges a few pieces wrongly once
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        """Need nothing any more."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def needs_of_all(folder: Path) -> dict[str, int]:
    """Return key -> steps until the first of all live processes needs the piece."""
    soonest: dict[str, int] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        # "r+": NFS locks only what is open for writing
        with contextlib.suppress(FileNotFoundError), path.open("r+", encoding="utf-8") as file:
            if not is_held(file.fileno()):
                path.unlink(missing_ok=True)
                continue
            for line in file:
                key, _, steps = line.rstrip("\n").partition(" ")
                if steps.isdecimal():
                    soonest[key] = min(int(steps), soonest.get(key, int(steps)))
    return soonest


def same_file(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
