"""Define what inputs are made of: formats, units that one process reads, and records."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from plumbline.data.inputs.reading import Reading

NOT_UTF8, EMPTY, PACKED, BINARY = "not UTF-8", "empty", "packed", "binary"
HARMLESS = (NOT_UTF8, EMPTY, PACKED, BINARY)
"""Reasons for leaving out a record that never stop the work."""
LONG_WINDOW = "requires too much memory for decoding"
"""zstd's message for an intact frame whose window exceeds the allowed 128 MiB."""


class Record(NamedTuple):
    """Hold one document, or the reason why a record is not one."""

    text: str | None
    reason: str | None
    """Why there is no text, as worded in the manifest, or None for a document or a blank line."""
    detail: str
    """What is wrong, and the remedy."""
    where: str
    """File, dataset or row for messages; {line} and {row} stand for numbers counted from the unit's first."""
    number: int
    after: int | None
    """Position from which reading can resume after this record, or None if it cannot."""


class BadRecordError(ValueError):
    """State why a row has no text."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Format:
    """Describe one kind of input: how it is read, and what is to be known of it before."""

    read: "Callable[[Reading, Unit, int | None], Iterator[Record]]"
    """Yield the records of a unit, the same at each call; see `read_records`. A reader that can resume within a unit
    sets `Record.after`, which is passed back as `at`."""
    suffixes: tuple[str, ...] = ()
    """Endings of the names of files that are read so, in small letters."""
    whole: str = ""
    """What a damaged file is not, such as "a whole gzip"; "" if no more than single records of it can be damaged."""
    is_text: bool = False
    """Whether a file is text, which a separator cuts and which is lost whole if it is binary or not UTF-8."""
    begins_anywhere: bool = False
    """Whether reading can begin at any byte, so that one file can be several units."""


@dataclass(frozen=True)
class Unit:
    """Describe what one process reads in one go: some files, a range of one file, or a part of a dataset."""

    source: int
    """Index of the source, in the order of the command line."""
    format: Format
    names: tuple[str, ...]
    """Paths of files, or the name of a dataset."""
    start: int = 0
    stop: int = 0
    """Range of bytes of a file of lines; for a dataset, the number of the part and of all parts."""
    in_parts: bool = False
    """Whether it is one document too long to be read at once (long_text.py), which has no records."""


def read_records(reading: Reading, unit: Unit, at: int | None = None) -> Iterator[Record]:
    """Yield the records of a unit, the same at each call.

    Args:
        reading: Defines the text of a row, and how files are cut into documents.
        unit: What to read; not `in_parts`.
        at: The `after` of the last record to skip; None reads from the beginning of the unit.
    """
    try:
        yield from unit.format.read(reading, unit, at)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        whole, name = unit.format.whole, unit.names[0]
        if not whole or getattr(error, "errno", None) is not None:  # an error of the disk, not of the file
            raise
        if LONG_WINDOW in str(error):
            detail = f"packed with a window that is not read ({error}); pack it again, by zstd without --long"
            yield Record(None, "window too large", detail, name, 0, None)
            return
        detail = f"not {whole} file, read up to the damage ({error}); copy it again"
        if isinstance(error, UnicodeEncodeError):  # reading encodes nothing
            detail = "has a name that is not UTF-8, by which pyarrow opens no file; rename it"
        yield Record(None, "damaged file", detail, name, 0, None)


def record_of_text(text: str, where: str, number: int, after: int | None) -> Record:
    """Return the record of a document, or of a text that cannot be one."""
    if not text.strip():
        return Record(None, EMPTY, "", where, number, after)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell but UTF-8 cannot
        return Record(None, NOT_UTF8, "half a surrogate pair", where, number, after)
    return Record(text, None, "", where, number, after)


def bad_record(error: BadRecordError, where: str, number: int, after: int | None) -> Record:
    """Return the record of a row without a text."""
    return Record(None, error.reason, str(error), where, number, after)


def record_of_row(reading: Reading, row: Any, where: str, number: int, after: int | None) -> Record:
    """Return the record of a row, or of the UnicodeDecodeError of one that is not UTF-8."""
    if isinstance(row, UnicodeDecodeError):
        return Record(None, NOT_UTF8, str(row), where, number, after)
    try:
        return record_of_text(_text_of(reading, row), where, number, after)
    except BadRecordError as error:
        return bad_record(error, where, number, after)


def _text_of(reading: Reading, row: Any) -> str:
    keys = (reading.text_key,) if reading.template is None else reading.fields
    if not isinstance(row, dict):
        found = f"the row is {type(row).__name__}, expected an object with field {keys[0]!r}"
        raise BadRecordError("no object", f"{found}: write one object a line")
    values: dict[str, str] = {}
    for key in keys:
        try:
            value = _field_of(row, key)
        except KeyError:
            raise no_field(key, row) from None
        if reading.template is not None and isinstance(value, int | float):
            value = str(value)
        if value is not None and not isinstance(value, str):
            raise BadRecordError("not text", f"field {key!r} is {type(value).__name__}, expected text")
        values[key] = value or ""
    if reading.template is None:
        return values[reading.text_key]
    return reading.template.format_map(values) if any(values.values()) else ""


def _field_of(row: Mapping[str, Any], key: str) -> Any:
    """Return a field of a row, possibly nested; None if it is null. Raises KeyError if it is missing."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[part]
    return value


def no_field(key: str, fields: Iterable[Any]) -> BadRecordError:
    """Return the error for rows without the field from which the text is to be made."""
    names = ", ".join(map(str, fields)) or "none"
    return BadRecordError(
        "no field", f"no field {key!r} (fields: {names}); name the right one with --text-key or --text-template"
    )
