"""The command prepare.py: which options it takes with which, and what it says at the end."""

import errno
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from plumbline.data.preparation.growing import append
from plumbline.data.sources import Sources
from tests.data.test_prepare import make, run


@pytest.mark.parametrize(
    ("task", "option"),
    [
        (("--merge", "a", "b", "--output", "c"), ("--deduplicate", "exact")),
        (("--append", "a", "--output", "c"), ("--tokenizer", "byte")),
        (("--append", "a", "--output", "c"), ("--seed", "5")),
        (("--verify", "a"), ("--output", "c")),
        (("--text-template", "{a}", "--source", "a", "--tokenizer", "byte", "--output", "c"), ("--text-key", "b")),
        (("--text-template", "{a}", "--append", "a", "--output", "c"), ("--text-key", "text")),
        (("--output", "c", "--source", "a", "--tokenizer", "byte"), ("--staging", "s")),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(task: tuple[str, ...], option: tuple[str, str]) -> None:
    refused = run(*task, *option)
    assert refused.returncode == 2
    assert f"{option[0]} does nothing with {task[0]}" in refused.stderr


def test_an_empty_field_is_not_taken_for_the_default(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n')
    refused = run("--source", tmp_path / "a.jsonl", "--tokenizer", "byte", "--output", tmp_path / "c", "--text-key", "")
    assert "no field '' (fields: text)" in refused.stderr


def test_the_next_command_can_be_typed_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    made = run("--source", tmp_path / "a.txt", "--tokenizer", "byte", "--output", tmp_path / "my data, v2's")
    command = shlex.split(made.stdout.rpartition("next: ")[2])
    assert "run.name=my-data-v2-s" in command
    source = yaml.safe_load(command[-1].removeprefix("data.train="))
    assert source == [{"path": str(tmp_path / "my data, v2's")}]


@pytest.mark.parametrize("name", ["123", "true", "2024-05-01", "x:", "plain"])
def test_a_name_that_yaml_reads_otherwise_is_quoted(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    made = run("--source", tmp_path / "a.txt", "--tokenizer", "byte", "--output", name, cwd=tmp_path)
    command = shlex.split(made.stdout.rpartition("next: ")[2])
    assert yaml.safe_load(command[-1].removeprefix("data.train=")) == [{"path": name}]


def test_texts_of_another_encoding_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(50)))
    (tmp_path / "b.jsonl").write_bytes('{"text": "grüße"}\n'.encode("latin-1") * 5)
    make(tmp_path / "*.jsonl", tmp_path / "c")
    assert "5 of 55 texts are not UTF-8 or binary, and left out; the first: " in caplog.text
    assert "b.jsonl:1" in caplog.text


def test_a_small_text_has_a_size_and_one_document_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    made = run("--source", tmp_path / "a.txt", "--tokenizer", "byte", "--output", tmp_path / "c")
    assert "source: 1 document, 350 bytes of text" in made.stderr
    assert "text  343 bytes\n" in made.stdout


@pytest.mark.parametrize("problem", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_manifest_that_cannot_be_locked_is_appended_to_unless_the_disk_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """As another user's corpus in a folder of one's own. Where nothing can be written, publishing says so."""
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "r+b":
            raise OSError(problem, os.strerror(problem), str(path))
        return opened(path, mode, *arguments, **options)

    (tmp_path / "in").mkdir()
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    (tmp_path / "in" / "b.txt").write_text("another\n" * 50)
    make(tmp_path / "a.txt", tmp_path / "c")
    more = Sources((str(tmp_path / "in"),))
    monkeypatch.setattr(Path, "open", refuse)
    if problem == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            append(tmp_path / "c", more)
    else:
        assert append(tmp_path / "c", more).manifest.splits["train"].shards == ["train", "train-00001"]
