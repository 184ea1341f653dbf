"""Mount a small disk in memory, which root alone may, and fill it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PAGE = 4096
"""Bytes that a file of one byte takes."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of 16 MB."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a failed write may keep its file open


def fill(disk: Path, room: int = 0) -> None:
    """Leave so many pages of room on a disk."""
    with (disk / "filler").open("ab", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        file.truncate(file.tell() - room * PAGE)


def free(disk: Path) -> None:
    """Take away what `fill` wrote."""
    (disk / "filler").unlink()
