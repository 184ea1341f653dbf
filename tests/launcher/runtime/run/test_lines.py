"""Lines are whole whatever the file system does, and nothing that it does ends a run."""

import os
from pathlib import Path
from typing import Any

import pytest

from plumbline.launcher.runtime.run.lines import Lines


class Away:
    """Stand for a file whose server is away after a few bytes: neither written to, nor cut, nor closed."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        self._file.write(data[:4])
        raise OSError("no answer")

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        raise OSError("no answer")


def refuse(*_arguments: Any) -> None:
    raise OSError("no answer")


@pytest.fixture
def log(tmp_path: Path) -> Lines:
    made = Lines(tmp_path / "log")
    made.add("first")
    return made


def test_what_was_written_in_part_is_dropped_once_the_file_system_is_back(
    log: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(log, "_file", Away(log._file))
        patched.setattr(os, "ftruncate", refuse)
        log.add("second")
        log.add("third")
    assert "(no answer): lines wait in memory" in capsys.readouterr().err
    assert (tmp_path / "log").read_text() != "first\n", "a part of the second stays for now"
    log.add("fourth")
    log.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\nfourth\n"
    assert "lacks nothing" in capsys.readouterr().err


def test_a_file_that_cannot_be_closed_is_a_warning(
    log: Lines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_file", Away(log._file))
    monkeypatch.setattr(os, "ftruncate", refuse)
    log.close()
    assert "may lack its last lines: no answer" in capsys.readouterr().err
