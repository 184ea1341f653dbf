"""List the formats of files, and tell by which of them a file is read.

A new format is a row of `FORMATS`, with a reader like those imported here.
"""

import codecs
import gzip
import json
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from plumbline.data.inputs.lines import open_zstd, read_lines, read_packed_lines
from plumbline.data.inputs.records import Format
from plumbline.data.inputs.tables import read_arrow, read_parquet
from plumbline.data.inputs.texts import LOOKED_AT, PACKED_SUFFIXES, read_separated, read_texts
from plumbline.data.preparation.long_text import PART_BYTES

_LINES = (".jsonl", ".jsonlines", ".jl", ".ndjson")

LINES = Format(read_lines, _LINES, begins_anywhere=True)
ARROW = Format(read_arrow, (".arrow",), "an Arrow")
FORMATS = (
    LINES,
    Format(partial(read_packed_lines, gzip.open), tuple(f"{name}.gz" for name in (*_LINES, ".json")), "a whole gzip"),
    Format(partial(read_packed_lines, open_zstd), tuple(f"{name}.zst" for name in (*_LINES, ".json")), "a whole zstd"),
    Format(read_parquet, (".parquet",), "a parquet"),
    ARROW,
)
"""Formats that the name of a file tells."""
TEXT = Format(read_texts, is_text=True)
"""Any other file."""
SEPARATED = Format(read_separated, is_text=True)
"""A file of text too large to be read at once, with separators."""

TABLES = (".csv", ".tsv", ".xls", ".xlsx")
ARRAY = re.compile(rb"\s*\[\s*\{")
"""The beginning of a .json file that holds one array of objects."""


def format_of(path: Path, fields: Collection[str]) -> Format:
    """Return how a file is read, judged by its name, and for .json by its first lines as well.

    Args:
        path: the file.
        fields: the fields of a row from which the text is made.
    """
    if found := _named_format(path):
        return found
    return LINES if path.name.lower().endswith(".json") and _begins_with_rows(path, fields) else TEXT


def _named_format(path: Path) -> Format | None:
    name = path.name.lower()
    return next((each for each in FORMATS if name.endswith(each.suffixes)), None)


def is_named_rows(path: Path) -> bool:
    """Return whether the name of a file tells that it holds rows."""
    return _named_format(path) is not None


def may_be_rows(path: Path) -> bool:
    """Return whether a file of this name can hold rows."""
    return is_named_rows(path) or path.name.lower().endswith(".json")


def is_packed(path: Path) -> bool:
    """Return whether a file is packed in a way that is not read."""
    return path.name.lower().endswith(PACKED_SUFFIXES) and not is_named_rows(path)


def packed_suffixes() -> list[str]:
    """Return the endings of packed files that are read."""
    return [suffix for each in FORMATS for suffix in each.suffixes if suffix.endswith(PACKED_SUFFIXES)]


def why_not_read(path: Path) -> str | None:
    """Return what a file is whose rows or texts cannot be read: packed, table or array; None for any other file."""
    if is_named_rows(path):  # also of a table, if `FORMATS` has a row for it
        return None
    if is_packed(path):
        return "packed"
    if path.suffix.lower() in TABLES:
        return "table"
    return "array" if _is_array_of_rows(path) else None


def is_text_of_rows(path: Path) -> bool:
    """Return whether a file is read as one text, by its name, though its first lines are objects."""
    return not may_be_rows(path) and len(_first_rows(path)) == 2


def _begins_with_rows(path: Path, fields: Collection[str]) -> bool:
    """Return whether the first two lines of a file are objects, as in an unpacked .json.gz.

    The only line of a file counts as a row if it has the fields: in a folder of code it is rather a setting or a
    manifest.
    """
    rows = _first_rows(path)
    return len(rows) == 2 or (len(rows) == 1 and rows[0].keys() >= set(fields))


def _first_rows(path: Path) -> list[dict[str, Any]]:
    """Return the first two lines of a file, without blank ones, if all are objects, else an empty list.

    A line longer than `PART_BYTES` is not taken for an object: it may be all of a large file.
    """
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        while len(rows) < 2 and (line := file.readline(PART_BYTES)):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return []
            if not isinstance(row, dict):
                return []
            rows.append(row)
    return rows


def _is_array_of_rows(path: Path) -> bool:
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        return ARRAY.match(file.read(LOOKED_AT).removeprefix(codecs.BOM_UTF8)) is not None
