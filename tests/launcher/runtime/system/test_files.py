"""Files that are there whole or not at all, and JSON Lines that are still being written."""

import errno
import fcntl
import math
import os
import threading
from pathlib import Path

import pytest

from plumbline.data import disk
from plumbline.data.damage import DamagedFileError, read_object, reading
from plumbline.data.disk import move
from plumbline.launcher.runtime.system import files
from plumbline.launcher.runtime.system.files import (
    finite,
    one_at_a_time,
    read_json_lines,
    read_key,
    write_json_lines,
    write_whole,
)


@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        (b"", []),
        (b'{"a": 1}\n\n{"a": 3}\n', [1, 3]),
        (b'{"a": 1}\n{"a": 2}', [1, 2]),
        (b'{"a": 1}\n{"a": "\xc3', [1]),
        (b'{"a": 1}\n\0\0\0\0\0', [1]),
        ('{"a": "one\u2028line"}\n'.encode(), [1]),
    ],
    ids=["empty", "blank", "no-end", "cut", "zeros", "separator"],
)
def test_lines_are_read_as_far_as_they_are_written(tmp_path: Path, content: bytes, numbers: list[int]) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    assert [number for number, _ in read_json_lines(file)] == numbers


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1}\n{"a": \n{"a": 3}\n', "lines.jsonl, line 2: not JSON"),
        ('{"a": 1}\n{"a": \n', "lines.jsonl, line 2: not JSON"),
        ("[1]\n", "lines.jsonl, line 1: a list, not an object"),
    ],
    ids=["middle", "ended", "list"],
)
def test_a_damaged_line_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        list(read_json_lines(file))


def test_a_folder_in_the_place_of_lines_is_no_error_of_a_disk(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="a folder, not a file; move it away"):
        list(read_json_lines(tmp_path))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    objects: list[dict[str, object]] = [{"loss": 0.1 + 0.2, "name": "é\u2028"}, {"step": 3}]
    write_json_lines(tmp_path / "lines.jsonl", objects)
    assert [item for _, item in read_json_lines(tmp_path / "lines.jsonl")] == objects


def test_what_json_does_not_have_is_null() -> None:
    assert finite({"a": [1.5, -math.inf], "b": {"c": (math.nan, "nan", None, 2)}}) == {
        "a": [1.5, None],
        "b": {"c": [None, "nan", None, 2]},
    }


def test_a_file_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    """Who has the old file open reads on in it, and nothing is left beside the new one."""
    file = tmp_path / "page.html"
    write_whole(file, "old")
    with file.open() as reader:
        write_whole(file, b"new")
        assert reader.read() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One writes it all while the other is about to give its own the final name."""
    file = tmp_path / "page.html"

    def write_meanwhile(_: Path) -> None:
        monkeypatch.undo()
        write_whole(file, "meanwhile")

    monkeypatch.setattr(files, "sync", write_meanwhile)
    write_whole(file, "last")
    assert file.read_text() == "last"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "page.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rename as an NFS client reports it whose request was answered, but not heard, and was sent again."""
    rename = Path.replace

    def replace(source: Path, target: Path) -> Path:
        rename(source, target)
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", replace)


def test_a_rename_that_was_done_and_is_reported_as_failed_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_answer(monkeypatch)
    write_whole(tmp_path / "page.html", "old")
    write_whole(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "new"
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "inside").touch()
    move(tmp_path / "staging", tmp_path / "final")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["final", "inside", "page.html"]


def test_a_rename_that_failed_is_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was lost on the way, and what has the final name is the one of before."""
    write_whole(tmp_path / "page.html", "old")

    def replace(source: Path, target: Path) -> Path:
        source.unlink()
        raise FileNotFoundError(f"{source} -> {target}")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "old"


def test_a_name_is_flushed_after_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[str, bool]] = []
    for module in (files, disk):
        monkeypatch.setattr(module, "sync", lambda path: flushed.append((path.name, (tmp_path / "page.html").exists())))
    write_whole(tmp_path / "page.html", "new")
    (content, named), last = flushed
    assert content.endswith(".staging")
    assert not named
    assert last == (tmp_path.name, True)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff{}", b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"])
def test_what_is_no_object_is_one_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"^/.*result\.json: cannot be read: [^\n]{5,200}$"):
        read_object(tmp_path / "result.json")


def test_an_error_that_names_the_file_itself_is_left_as_it_is(tmp_path: Path) -> None:
    told = ValueError(f"{tmp_path}/config.yaml: 2 problem(s)\n  one\n  two")
    with pytest.raises(ValueError, match="2 problem") as caught, reading(tmp_path):
        raise told
    assert caught.value is told
    with (
        pytest.raises(DamagedFileError, match=f"{tmp_path}: cannot be read: 'step' is missing; copy it"),
        reading(tmp_path, "copy it"),
    ):
        raise KeyError("step")


@pytest.mark.parametrize("value", [None, "7", 7.0, True])
def test_a_value_of_another_type_is_named(value: object) -> None:
    with pytest.raises(DamagedFileError, match=r"^file: step = .*: expected a value of type int$"):
        read_key({"step": value}, "step", int, "file")


def test_one_process_at_a_time_is_let_in(tmp_path: Path) -> None:
    inside: list[str] = []

    def other() -> None:
        with one_at_a_time(tmp_path / ".lock"):
            inside.append("other")

    thread = threading.Thread(target=other)  # each opens the file anew, so a thread serves for a process
    with one_at_a_time(tmp_path / ".lock"):
        thread.start()
        thread.join(0.3)
        inside.append("first")
    thread.join()
    assert inside == ["first", "other"]


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with one_at_a_time(tmp_path / ".lock"):
        pass
    assert f"{tmp_path / '.lock'} cannot be locked ([Errno 38] Function not implemented)" in capsys.readouterr().err
