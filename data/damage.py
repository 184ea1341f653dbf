"""Turn the many errors that a damaged file can cause into one kind, which names the file."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plumbline.data.disk import AWAY, number_of


class DamagedFileError(ValueError):
    """Refuse a file or folder that does not hold what it should; the message names it."""


@contextmanager
def reading(path: Path | str, remedy: str = "") -> Iterator[None]:
    """Turn any error while a file or folder is read into a DamagedFileError that names it.

    A file from elsewhere, or one that a crash left, may hold anything, and the libraries that read it raise all kinds
    of errors. Errors that name the path themselves pass unchanged. A disk that is away says nothing of the file: its
    error stays an OSError, so that the file is not taken for damaged.

    Args:
        path: what is read.
        remedy: what to do about it, at the end of the message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            raise
        number = number_of(error)
        if number is not None and number in AWAY:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise DamagedFileError(f"{path}: cannot be read: {in_words(error)}{remedy and f'; {remedy}'}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the keys and values of a JSON file.

    Raises:
        DamagedFileError: the file holds something else; names the file.
        OSError: the file does not exist, or cannot be read.
    """
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not an object with keys")
    return found


def in_words(error: Exception) -> str:
    """Return the first line of an error, worded for users."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = " ".join(lines[: 1 + lines[0].endswith(":")])  # the text after a colon is in the next line
    return re.sub(r"\s+", " ", first)[:300]
