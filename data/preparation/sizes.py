"""Parse human-readable sizes."""

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
