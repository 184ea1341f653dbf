"""Parse and write human-readable sizes and counts."""

import re

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Return the bytes in a size such as 500MB or 4GB.

    Raises:
        ValueError: it is not a size, or less than one byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?B?)", text, re.IGNORECASE)
    if not found or found[2].upper() not in UNITS:
        raise ValueError(f"{text!r}: expected a size such as 500MB or 4GB")
    count = int(float(found[1]) * UNITS[found[2].upper()])
    if count < 1:
        raise ValueError(f"{text!r}: expected at least one byte")
    return count


def in_units(size: int) -> str:
    """Return a number of bytes in the largest unit of which there is one: 13 bytes, 493.2 KB, 31.0 MB."""
    name, unit = max((item for item in UNITS.items() if item[1] <= max(1, size)), key=lambda item: item[1])
    return f"{size / unit:,.1f} {name}" if name else counted(size, "byte")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 document, 1,758 documents."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
