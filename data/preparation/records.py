"""Read a unit as records: documents, or the reason why a record is not one.

A new kind of file needs a reader here, its name in `READERS`, and its suffix in source_files.kind_of. A reader that can
resume within its unit sets `Record.after`, which is passed back as `at`.
"""

import codecs
import gzip
import io
import json
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from plumbline.data.source_files import LOOKED_AT, is_packed
from plumbline.data.sources import Sources, Unit, field_of, open_dataset

NOT_UTF8, EMPTY, PACKED, BINARY = "not UTF-8", "empty", "packed", "binary"
HARMLESS = (NOT_UTF8, EMPTY, PACKED, BINARY)
"""Reasons for leaving out a record that never stop the work."""
OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
FORMATS = {"gz": "a whole gzip", "zst": "a whole zstd", "parquet": "a parquet", "arrow": "an Arrow"}
"""Suffixes of files that can be damaged as a whole."""
LONG_WINDOW = "requires too much memory for decoding"
"""zstd's message for an intact frame whose window exceeds the allowed 128 MiB."""
MOST_SAID = 300
"""Most characters shown of an error of `datasets`, which lists all columns."""
BLOCK_BYTES = 1 << 20
LONGEST_LINE = 1 << 30
"""Most bytes of a line of a packed file: a small one can hold a line that no memory does."""
ROWS, TABLE_BYTES = 1024, 4 << 20
"""Most rows, and approximately the most bytes, of a parquet file that become Python objects at once."""


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


def read_records(sources: Sources, unit: Unit, at: int | None = None) -> Iterator[Record]:
    """Yield the records of a unit, the same at each call.

    Args:
        sources: Defines the text of a row, and how files are cut into documents.
        unit: One of `sources.units()`.
        at: The `after` of the last record to skip; None reads from the beginning of the unit.
    """
    try:
        yield from READERS[unit.kind](sources, unit, at)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        name = unit.names[0]
        ending = name.rpartition(".")[2].lower()
        if ending not in FORMATS or getattr(error, "errno", None) is not None:  # an error of the disk, not of the file
            raise
        if LONG_WINDOW in str(error):
            detail = f"packed with a window that is not read ({error}); pack it again, by zstd without --long"
            yield Record(None, "window too large", detail, name, 0, None)
            return
        detail = f"not {FORMATS[ending]} file ({error}); copy it again"
        if isinstance(error, UnicodeEncodeError):  # reading encodes nothing
            detail = "has a name that is not UTF-8, by which pyarrow opens no file; rename it"
        yield Record(None, "damaged file", detail, name, 0, None)


def is_binary(data: bytes) -> bool:
    """Return whether a file that begins with `data` is binary: more than 1 % of its first bytes are 0.

    UTF-16 and UTF-32 with a byte order mark are text in another encoding.
    """
    start = data[:LOOKED_AT]
    return start.count(0) > len(start) / 100 and not start.startswith(OTHER_ENCODINGS)


def _document(text: str, where: str, number: int, after: int | None) -> Record:
    if not text.strip():
        return Record(None, EMPTY, "", where, number, after)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell but UTF-8 cannot
        return Record(None, NOT_UTF8, "half a surrogate pair", where, number, after)
    return Record(text, None, "", where, number, after)


def _bad(error: BadRecordError, where: str, number: int, after: int | None) -> Record:
    return Record(None, error.reason, str(error), where, number, after)


def _read_files(sources: Sources, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read small text files; `after` counts files."""
    for number in range(at or 0, len(unit.names)):
        name = unit.names[number]
        if is_packed(Path(name)):
            yield Record(None, PACKED, "packed; unpack it", name, 0, number + 1)
            continue
        data = Path(name).read_bytes()
        if is_binary(data):
            yield Record(None, BINARY, "a binary file", name, 0, number + 1)
            continue
        try:
            text = data.removeprefix(codecs.BOM_UTF8).decode()  # not read_text, which would change line ends
        except UnicodeDecodeError as error:
            yield Record(None, NOT_UTF8, str(error), name, 0, number + 1)
            continue
        documents = [text] if sources.document_separator is None else text.split(sources.document_separator)
        for document in documents[:-1]:
            yield _document(document, name, 0, None)
        yield _document(documents[-1], name, 0, number + 1)


def _read_separated(sources: Sources, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read a large text file document by document; `after` counts bytes."""
    (name,) = unit.names
    separator = (sources.document_separator or "").encode()
    with Path(name).open("rb") as file:
        start = file.read(LOOKED_AT)
        if is_binary(start):
            yield Record(None, BINARY, "a binary file", name, 0, None)
            return
        file.seek(0)
        if at is None and (problem := not_utf8(file)):
            yield Record(None, NOT_UTF8, problem, name, 0, None)
            return
        begin = at or len(codecs.BOM_UTF8) * start.startswith(codecs.BOM_UTF8)  # of the document within the file
        file.seek(begin)
        buffer, searched = bytearray(), 0
        while block := file.read(BLOCK_BYTES):
            buffer += block
            first = 0
            while (end := buffer.find(separator, max(first, searched))) >= 0:
                document, first = bytes(buffer[first:end]), end + len(separator)
                begin += len(document) + len(separator)
                yield _document(document.decode(), name, 0, begin)
            del buffer[:first]
            searched = max(0, len(buffer) - len(separator) + 1)
        yield _document(buffer.decode(), name, 0, None)


def not_utf8(file: BinaryIO) -> str | None:
    """Return the decoder's message about the first byte that is not UTF-8, or None if the file is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while block := file.read(BLOCK_BYTES):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = file.tell() - len(error.object) + error.start  # the decoder counts from the beginning of the last block
        return f"'utf-8' codec can't decode byte {error.object[error.start]:#04x} in position {at}: {error.reason}"
    return None


def _read_lines(sources: Sources, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read the lines that begin in the unit's range of a file; `after` counts bytes of the file."""
    (name,) = unit.names
    with Path(name).open("rb") as file:
        if at is not None:
            offset = at
        elif unit.start == 0:
            offset = 0
        else:
            file.seek(unit.start - 1)
            offset = unit.start - 1 + len(file.readline())
        file.seek(offset)
        number = 0
        while offset < unit.stop and (line := file.readline()):
            number += 1
            offset += len(line)
            yield _record_of_line(sources, line, f"{name}:{{line}}", number, offset)


def _record_of_line(sources: Sources, line: bytes, where: str, number: int, after: int | None) -> Record:
    line = line.strip()
    if not line:
        return Record(None, None, "", where, number, after)
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return Record(None, NOT_UTF8, str(error), where, number, after)
    except (ValueError, RecursionError) as error:  # including numbers with thousands of digits
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Record(None, "not JSON", f"not JSON ({problem}); fix or remove it", where, number, after)
    return _record_of_row(sources, row, where, number, after)


def _read_compressed(sources: Sources, unit: Unit, _: int | None) -> Iterator[Record]:
    """Read the lines of a .gz or .zst file, always from its beginning."""
    (name,) = unit.names
    with _decompressed(name) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line) > LONGEST_LINE:
                detail = f"line {number} is longer than {LONGEST_LINE:,} bytes; the file is read up to it, so cut it"
                yield Record(None, "line too long", detail, name, 0, None)
                return
            yield _record_of_line(sources, line, f"{name}:{{line}}", number, None)


def _decompressed(name: str) -> Any:
    if name.lower().endswith(".gz"):
        return gzip.open(name)
    import pyarrow  # comes with datasets, and knows zstd

    return io.BufferedReader(pyarrow.input_stream(name, compression="zstd"), BLOCK_BYTES)


def _read_parquet(sources: Sources, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read a parquet file; `after` counts row groups."""
    import pyarrow.parquet  # comes with datasets; only needed here

    (name,) = unit.names
    with pyarrow.parquet.ParquetFile(name) as table:
        names = table.schema_arrow.names
        columns = _columns(sources, names)
        if missing := [column for column in columns if column not in names]:
            yield _bad(_no_field(missing[0], names), name, 0, None)
            return
        groups = range(table.num_row_groups)
        number = sum(table.metadata.row_group(group).num_rows for group in groups[: at or 0])
        for group in groups[at or 0 :]:
            facts = table.metadata.row_group(group)
            at_once = max(1, min(ROWS, TABLE_BYTES * facts.num_rows // max(1, facts.total_byte_size)))
            batches = table.iter_batches(batch_size=at_once, row_groups=[group], columns=columns)
            rows = (row for batch in batches for row in _rows_of(batch))
            yield from _rows(sources, rows, name, number, group + 1)
            number += facts.num_rows


def _read_arrow(sources: Sources, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read an Arrow file in either of its two formats; `after` counts record batches."""
    import pyarrow  # comes with datasets; only needed here

    (name,) = unit.names
    with pyarrow.memory_map(name) as file:
        batches, names = _batches_of(pyarrow, file)
        columns = _columns(sources, names)
        if missing := [column for column in columns if column not in names]:
            yield _bad(_no_field(missing[0], names), name, 0, None)
            return
        number = 0
        for place, batch in enumerate(batches):
            if place >= (at or 0):
                yield from _rows(sources, _rows_of(batch.select(columns)), name, number, place + 1)
            number += batch.num_rows


def _batches_of(pyarrow: Any, file: Any) -> tuple[Iterator[Any], list[str]]:
    try:
        table = pyarrow.ipc.open_file(file)
    except ValueError:
        file.seek(0)
        stream = pyarrow.ipc.open_stream(file)
        return iter(stream), stream.schema.names
    return (table.get_batch(number) for number in range(table.num_record_batches)), table.schema.names


def _columns(sources: Sources, names: list[str]) -> list[str]:
    """Return the columns from which the text is made; a column name may contain a dot."""
    is_column = sources.template is None and sources.text_key in names
    return [sources.text_key] if is_column else list(sources.fields)


def _rows_of(batch: Any) -> Iterator[Any]:
    """Yield the rows of a batch of columns, or the UnicodeDecodeError of a row that is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield from batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield error


def _rows(sources: Sources, rows: Iterable[Any], name: str, first: int, after: int) -> Iterator[Record]:
    """Yield the records of a group of rows; reading can only resume after the last one."""
    waiting: Record | None = None
    for number, row in enumerate(rows, start=first):
        if waiting is not None:
            yield waiting
        waiting = _record_of_row(sources, row, f"{name}: row {{row}}", number, None)
    if waiting is not None:
        yield waiting._replace(after=after)


def _read_dataset(sources: Sources, unit: Unit, _: int | None) -> Iterator[Record]:
    """Read one part of a dataset of `datasets`, always from its beginning."""
    (spec,) = unit.names
    rows = _opened(spec)
    if unit.stop > 1:
        rows = rows.shard(num_shards=unit.stop, index=unit.start)
    for number, row in enumerate(_streamed(spec, rows)):
        yield _record_of_row(sources, row, f"{spec}: row {{row}}", number, None)


def _streamed(spec: str, rows: Iterable[Any]) -> Iterator[Any]:
    """Yield rows of a dataset; errors name it: ValueError if it would fail again, else OSError."""
    try:
        yield from rows
    except MemoryError:
        raise
    except Exception as error:  # datasets and its file readers have errors of their own
        problem = textwrap.shorten(str(error), MOST_SAID) or type(error).__name__
        text = f"--source {spec}: datasets cannot read its rows ({problem}); "
        if isinstance(error, ValueError):
            raise ValueError(f"{text}mend it, or name its files as sources, whose columns may differ") from error
        raise OSError(f"{text}see to the dataset or the network: the same command goes on from here") from error


_opened = lru_cache(maxsize=4)(open_dataset)  # once per process, since each call queries the hub


def _record_of_row(sources: Sources, row: Any, where: str, number: int, after: int | None) -> Record:
    if isinstance(row, UnicodeDecodeError):
        return Record(None, NOT_UTF8, str(row), where, number, after)
    try:
        return _document(_text_of(sources, row), where, number, after)
    except BadRecordError as error:
        return _bad(error, where, number, after)


def _text_of(sources: Sources, row: Any) -> str:
    keys = (sources.text_key,) if sources.template is None else sources.fields
    if not isinstance(row, dict):
        found = f"the row is {type(row).__name__}, expected an object with field {keys[0]!r}"
        raise BadRecordError("no object", f"{found}: write one object a line")
    values: dict[str, str] = {}
    for key in keys:
        try:
            value = field_of(row, key)
        except KeyError:
            raise _no_field(key, row) from None
        if sources.template is not None and isinstance(value, int | float):
            value = str(value)
        if value is not None and not isinstance(value, str):
            raise BadRecordError("not text", f"field {key!r} is {type(value).__name__}, expected text")
        values[key] = value or ""
    if sources.template is None:
        return values[sources.text_key]
    return sources.template.format_map(values) if any(values.values()) else ""


def _no_field(key: str, fields: Iterable[Any]) -> BadRecordError:
    names = ", ".join(map(str, fields)) or "none"
    return BadRecordError(
        "no field", f"no field {key!r} (fields: {names}); name the right one with --text-key or --text-template"
    )


READERS: dict[str, Callable[[Sources, Unit, int | None], Iterator[Record]]] = {
    "text": _read_files,
    "separated": _read_separated,
    "lines": _read_lines,
    "compressed lines": _read_compressed,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "hugging face": _read_dataset,
}
