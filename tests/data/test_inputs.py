"""Inputs of one's own: a row of a table for a format, a line of another for a kind of source."""

import bz2
import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from plumbline.data.inputs import formats, kinds
from plumbline.data.inputs.lines import read_packed_lines
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import Format, Record, Unit, record_of_row
from plumbline.data.inputs.source import Source
from plumbline.data.sources import Sources
from tests.data.reading import TEXTS, json_lines, read


def test_a_row_of_the_table_is_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(json_lines(*TEXTS)))
    with pytest.raises(ValueError, match="is packed, and of such files"):
        read(tmp_path / "a.jsonl.bz2")
    row = Format(partial(read_packed_lines, bz2.open), (".jsonl.bz2",), "a whole bzip2")
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, row))
    assert read(tmp_path / "a.jsonl.bz2")[0] == read(tmp_path)[0] == TEXTS
    (tmp_path / "a.jsonl.bz2").write_bytes(b"BZ")
    with pytest.raises(ValueError, match=r"a\.jsonl\.bz2: not a whole bzip2 file"):
        read(tmp_path)


def test_a_table_that_has_a_row_is_no_text_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_table(reading: Reading, unit: Unit, _: int | None) -> Iterator[Record]:
        with Path(unit.names[0]).open(newline="") as file:
            rows = list(csv.DictReader(file))
        return (record_of_row(reading, row, "row {row}", number, None) for number, row in enumerate(rows))

    (tmp_path / "a.csv").write_text("text,year\none,1\ntwo,2\n")
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, Format(read_table, (".csv",))))
    assert read(tmp_path / "a.csv")[0] == read(tmp_path)[0] == ["one", "two"]
    assert not list(Sources((str(tmp_path),)).listed().warnings())


def test_a_class_in_the_table_is_a_kind_of_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(reading: Reading, unit: Unit, at: int | None) -> Iterator[Record]:
        return (record_of_row(reading, {"text": f"row {row}"}, "row {row}", row, None) for row in range(unit.stop))

    class Counted(Source):
        """Stand for a database: the argument says how many rows it has."""

        @classmethod
        def is_meant_by(cls, spec: str) -> bool:
            return spec.startswith("count:")

        def units(self, number: int) -> Iterator[Unit]:
            yield Unit(number, Format(counted), (self.spec,), 0, int(self.spec.removeprefix("count:")))

    monkeypatch.setattr(kinds, "KINDS", (Counted, *kinds.KINDS))
    assert read("count:2")[0] == ["row 0", "row 1"]
    assert not list(Sources(("count:2",)).listed().warnings())
    with pytest.raises(ValueError, match="both name count:2"):
        Sources(("count:2", "count:3", "count:2")).listed().fingerprint()
