"""What lies at the end of a long file is read without what lies before it."""

import json
from pathlib import Path
from typing import Any

import pytest

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.system import tail
from plumbline.launcher.runtime.system.files import read_json_lines
from plumbline.launcher.runtime.system.tail import Line, lines_from_end, lines_since, texts_from_end


def put(folder: Path, *records: dict[str, Any]) -> Path:
    """Return a file with these lines."""
    file = folder / "lines.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def step_of(line: Line) -> int | None:
    return line.item.get("step")


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b'{"a": 1}\n\n{"a": 3}\n',
        b'\n{"a": 1}\n{"a": 2}',
        b'{"a": 1}\n{"a": "\xc3',
        b'{"a": 1}\n\0\0\0\0\0',
        '{"a": "one\u2028line"}\n{"a": "é"}\n'.encode(),
    ],
    ids=["empty", "blank", "between", "no-end", "cut", "zeros", "separator"],
)
def test_lines_are_those_that_are_read_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, block: int
) -> None:
    monkeypatch.setattr(tail, "BLOCK", block)
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    found = list(lines_from_end(file))
    assert [line.item for line in found] == [item for _, item in read_json_lines(file)][::-1]
    assert all(content[line.start :].startswith(line.text) for line in found)
    assert [text for _, text in texts_from_end(file)] == [line for line in content.split(b"\n") if line.strip()][::-1]


def test_only_so_many_bytes_are_looked_at(tmp_path: Path) -> None:
    file = put(tmp_path, {"a": 1}, {"a": 2}, {"a": 3})
    assert [line.item["a"] for line in lines_from_end(file, 18)] == [2, 1]


def test_a_damaged_line_that_is_come_to_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\nnothing\n{"a": 3}\n')
    lines = lines_from_end(file)
    assert next(lines).item == {"a": 3}
    with pytest.raises(DamagedFileError, match=r"lines\.jsonl, line 2: not JSON"):
        next(lines)


def test_what_is_of_earlier_steps_is_left_aside(tmp_path: Path) -> None:
    """From the last line of an earlier step on; what is of no step goes with its neighbours."""
    records: list[dict[str, Any]] = [
        {"step": 1},
        {"note": "x"},
        {"step": 2},
        {"step": 2, "b": 1},
        {"note": "y"},
        {"step": 4},
        {"step": 5},
    ]
    file = put(tmp_path, *records)
    for step, first in ((1, 0), (2, 0), (3, 3), (4, 3), (5, 5), (9, 6)):
        before, lines = lines_since(file, step, step_of)
        assert [line.item for line in lines] == records[first:]
        assert before == len("".join(f"{json.dumps(record)}\n" for record in records[:first]))


def test_where_steps_do_not_ascend_all_lines_are_returned(tmp_path: Path) -> None:
    records = [{"step": step} for step in (1, 2, 7, 3, 4, 5)]
    file = put(tmp_path, *records)
    assert [line.item for line in lines_since(file, 3, step_of)[1]] == records
    assert [line.item["step"] for line in lines_since(file, 4, step_of)[1]] == [3, 4, 5], "as far as it was read"
