"""Read JSON Lines from the end: what lies behind a place in a long file is found without reading what lies before."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.system.files import parse_line, read_json_lines

BLOCK = 2**18
"""Bytes of a file that are read at once."""


class Line(NamedTuple):
    """Hold a line: the byte at which it begins, its text without an end, and its object."""

    start: int
    text: bytes
    item: dict[str, Any]


def texts_from_end(path: Path, size: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield where each line that is not blank begins, and its text, the last line first.

    Args:
        path: the file.
        size: how many of its bytes to look at; None: all.
    """
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END) if size is None else size
        rest = b""  # begins where the block before it ended, maybe amid a line
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
    """Yield the lines that are not blank, the last one first; an unfinished one is left out, as `read_json_lines` does.

    Args:
        path: the file.
        size: how many of its bytes to look at; None: all.

    Raises:
        DamagedFileError: a line that is come to is no JSON object; names the file and the line.
    """
    size = path.stat().st_size if size is None else size
    for start, text in texts_from_end(path, size):
        try:
            item = parse_line(text, str(path), has_end=start + len(text) < size)
        except DamagedFileError:
            for _ in read_json_lines(path):  # whoever is to mend it wants the number of the line
                pass
            raise
        if item is not None:
            yield Line(start, text, item)


def lines_since(
    path: Path, step: int, step_of: Callable[[Line], int | None], size: int | None = None
) -> tuple[int, list[Line]]:
    """Return the last line of a step before `step` and all lines behind it, in order, and how many bytes lie before it.

    Training writes its steps in order, so all before that line is of earlier steps, too. Where steps do not ascend in
    what is read, somebody else has written to the file, and all of its lines are returned.

    Args:
        path: the file.
        step: from which on no line must be missing.
        step_of: says of which step a line is; None: of none.
        size: how many bytes of the file to look at; None: all.

    Raises:
        DamagedFileError: a line that is come to is no JSON object; names the file and the line.
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
