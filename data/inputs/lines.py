"""Read files whose lines are JSON objects, packed or not."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import NOT_UTF8, Record, Unit, record_of_row

LONGEST_LINE = 1 << 30
"""Most bytes of a line of a packed file: a small one can hold a line that no memory does."""
BLOCK_BYTES = 1 << 20


def read_lines(reading: Reading, unit: Unit, at: int | None) -> Iterator[Record]:
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
            yield _record_of_line(reading, line, f"{name}:{{line}}", number, offset)


def _record_of_line(reading: Reading, line: bytes, where: str, number: int, after: int | None) -> Record:
    line = line.strip()
    if not line:
        return Record(None, None, "", where, number, after)
    if b"\0" in line:  # which JSON never has, and json.loads would guess another encoding by
        return Record(None, NOT_UTF8, "bytes of 0, as in UTF-16; write it as UTF-8", where, number, after)
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return Record(None, NOT_UTF8, str(error), where, number, after)
    except (ValueError, RecursionError) as error:  # including numbers with thousands of digits
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Record(None, "not JSON", f"not JSON ({problem}); fix or remove it", where, number, after)
    return record_of_row(reading, row, where, number, after)


def read_packed_lines(unpacked: Callable[[str], Any], reading: Reading, unit: Unit, _: int | None) -> Iterator[Record]:
    """Read the lines of a packed file, which `unpacked` opens, always from its beginning."""
    (name,) = unit.names
    if not Path(name).stat().st_size:  # of which gzip and pyarrow unpack no line, as if nothing were missing
        raise EOFError("it is empty")
    with unpacked(name) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line) > LONGEST_LINE:
                detail = f"line {number} is longer than {LONGEST_LINE:,} bytes; the file is read up to it, so cut it"
                yield Record(None, "line too long", detail, name, 0, None)
                return
            yield _record_of_line(reading, line, f"{name}:{{line}}", number, None)


def open_zstd(name: str) -> io.BufferedReader:
    """Open a file that is packed by zstd."""
    import pyarrow  # comes with datasets; only needed here

    return io.BufferedReader(pyarrow.input_stream(name, compression="zstd"), BLOCK_BYTES)
