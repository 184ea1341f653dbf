"""Read parquet and Arrow files, in bounded memory."""

from collections.abc import Iterable, Iterator
from typing import Any

from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import Record, Unit, bad_record, no_field, record_of_row

ROWS, TABLE_BYTES = 1024, 4 << 20
"""Most rows, and approximately the most bytes, of a parquet file that become Python objects at once."""


def read_parquet(reading: Reading, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read a parquet file; `after` counts row groups."""
    import pyarrow.parquet  # comes with datasets; only needed here

    (name,) = unit.names
    with pyarrow.parquet.ParquetFile(name) as table:
        names = table.schema_arrow.names
        columns = _columns(reading, names)
        if missing := [column for column in columns if column not in names]:
            yield bad_record(no_field(missing[0], names), name, 0, None)
            return
        groups = range(table.num_row_groups)
        number = sum(table.metadata.row_group(group).num_rows for group in groups[: at or 0])
        for group in groups[at or 0 :]:
            facts = table.metadata.row_group(group)
            at_once = max(1, min(ROWS, TABLE_BYTES * facts.num_rows // max(1, facts.total_byte_size)))
            batches = table.iter_batches(batch_size=at_once, row_groups=[group], columns=columns)
            rows = (row for batch in batches for row in _rows_of(batch))
            yield from _rows(reading, rows, name, number, group + 1)
            number += facts.num_rows


def read_arrow(reading: Reading, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read an Arrow file in either of its two formats; `after` counts record batches."""
    import pyarrow  # comes with datasets; only needed here

    (name,) = unit.names
    with pyarrow.memory_map(name) as file:
        batches, names = _batches_of(pyarrow, file)
        columns = _columns(reading, names)
        if missing := [column for column in columns if column not in names]:
            yield bad_record(no_field(missing[0], names), name, 0, None)
            return
        number = 0
        for place, batch in enumerate(batches):
            if place >= (at or 0):
                yield from _rows(reading, _rows_of(batch.select(columns)), name, number, place + 1)
            number += batch.num_rows


def _batches_of(pyarrow: Any, file: Any) -> tuple[Iterator[Any], list[str]]:
    try:
        table = pyarrow.ipc.open_file(file)
    except ValueError:
        file.seek(0)
        stream = pyarrow.ipc.open_stream(file)
        return iter(stream), stream.schema.names
    return (table.get_batch(number) for number in range(table.num_record_batches)), table.schema.names


def _columns(reading: Reading, names: list[str]) -> list[str]:
    """Return the columns from which the text is made; a column name may contain a dot."""
    is_column = reading.template is None and reading.text_key in names
    return [reading.text_key] if is_column else list(reading.fields)


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


def _rows(reading: Reading, rows: Iterable[Any], name: str, first: int, after: int) -> Iterator[Record]:
    """Yield the records of a group of rows; reading can only resume after the last one."""
    waiting: Record | None = None
    for number, row in enumerate(rows, start=first):
        if waiting is not None:
            yield waiting
        waiting = record_of_row(reading, row, f"{name}: row {{row}}", number, None)
    if waiting is not None:
        yield waiting._replace(after=after)
