"""Read the end of a long JSON Lines file without reading its beginning."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.system.files import parse_line, read_json_lines

BLOCK = 2**18
"""Bytes of a file that are read at once."""


class Line(NamedTuple):
    """Hold a line: the offset of its first byte, its text without the line end, and its object."""

    start: int
    text: bytes
    item: dict[str, Any]


def texts_from_end(path: Path, size: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the offset in bytes and the text of each line that is not blank, the last line first.

    Args:
        path: the file.
        size: number of bytes to consider, from the beginning of the file; None means all.
    """
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END) if size is None else size
        rest = b""  # unfinished first line of the blocks read so far: its beginning is in an earlier block
        while start > 0:
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            at = start + len(rest) + sum(len(line) + 1 for line in lines)
            for line in reversed(lines):
                at -= len(line)
                if line.strip():
                    yield at, line
                at -= 1
        if rest.strip():
            yield 0, rest


def lines_from_end(path: Path, size: int | None = None) -> Iterator[Line]:
    """Yield the lines that are not blank, the last first, without an unfinished last line, as `read_json_lines` does.

    Args:
        path: the file.
        size: number of bytes to consider, from the beginning of the file; None means all.

    Raises:
        DamagedFileError: a line that was read is not a JSON object; names the file and the line.
    """
    size = path.stat().st_size if size is None else size
    for start, text in texts_from_end(path, size):
        try:
            item = parse_line(text, str(path), has_end=start + len(text) < size)
        except DamagedFileError:
            for _ in read_json_lines(path):  # raises an error with the line number, for whoever repairs the file
                pass
            raise
        if item is not None:
            yield Line(start, text, item)


def lines_since(
    path: Path, step: int, step_of: Callable[[Line], int | None], size: int | None = None
) -> tuple[int, list[Line]]:
    """Return the number of bytes before the last line of a step before `step`, and that line with all lines after it.

    The lines are in the order of the file. Training writes steps in ascending order, so all lines before that one are
    of earlier steps too. If the steps that are read do not ascend, another process has written to the file, and all
    of its lines are returned.

    Args:
        path: the file.
        step: the lines of this and all later steps are returned.
        step_of: returns the step of a line, or None if it has no step.
        size: number of bytes to consider, from the beginning of the file; None means all.

    Raises:
        DamagedFileError: a line that was read is not a JSON object; names the file and the line.
    """
    found: list[Line] = []
    later, ascends = None, True
    for line in lines_from_end(path, size):
        found.append(line)
        its = step_of(line)
        if its is not None:
            ascends = ascends and (later is None or its <= later)
            later = its
            if its < step and ascends:
                return line.start, found[::-1]
    return 0, found[::-1]
