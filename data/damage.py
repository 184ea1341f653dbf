"""Name the file that cannot be read: one kind of error for whatever a damaged file makes its readers raise."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DamagedFileError(ValueError):
    """Refuse a file or folder that does not hold what it should; the message names it."""


@contextmanager
def reading(path: Path | str, remedy: str = "") -> Iterator[None]:
    """Turn whatever goes wrong while a file or folder is read into a DamagedFileError that names it.

    What somebody else wrote, or a crash left, may hold anything; the libraries that read it raise as many kinds of
    errors as there are ways to be wrong. Errors that name the path themselves pass.

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
        raise DamagedFileError(f"{path}: cannot be read: {in_words(error)}{remedy and f'; {remedy}'}") from error


def in_words(error: Exception) -> str:
    """Return the first line of an error in words for users."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = " ".join(lines[: 1 + lines[0].endswith(":")])  # what it announces so is in the next line
    return re.sub(r"\s+", " ", first)[:300]
