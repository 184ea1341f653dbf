"""Tell processes that share a cache what each will read next, so that the least urgent piece is evicted.

Each process has a file that it keeps locked, with one line per piece and the steps until it is needed. An unlocked file
belongs to a dead process and is removed.
"""

import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path

from plumbline.data.locks import is_held, same_file, wait_for

KEY = "data.cache.path"
"""Configuration key that decides where plans and pieces lie."""


class Plan:
    """Announce what this process needs next."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        needs_of_all(folder)  # removes what dead processes left
        self._path = folder / uuid.uuid4().hex
        while True:
            self._file = self._path.open("w", encoding="utf-8")
            wait_for(self._file, KEY, folder.parent)
            if same_file(self._file.fileno(), self._path):
                break
            self._file.close()  # removed as a dead process's before it was locked

    def write(self, needs: Mapping[str, int]) -> None:
        """Replace the plan: key of a piece -> steps until it is needed."""
        text = "".join(f"{key} {steps}\n" for key, steps in needs.items())
        # In place, to keep the lock: a concurrent reader may see part of it and misjudge a few pieces once
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        """Withdraw the plan."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def needs_of_all(folder: Path) -> dict[str, int]:
    """Return key -> steps until the first live process needs the piece."""
    soonest: dict[str, int] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        # "r+": NFS only locks files open for writing
        with contextlib.suppress(FileNotFoundError), path.open("r+", encoding="utf-8") as file:
            if not is_held(file.fileno()):
                path.unlink(missing_ok=True)
                continue
            for line in file:
                key, _, steps = line.rstrip("\n").partition(" ")
                if steps.isdecimal():
                    soonest[key] = min(int(steps), soonest.get(key, int(steps)))
    return soonest
