"""Tasks from a file of JSON Lines: what is read, what is to be said, and what is refused, with its line and field."""

import gzip
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.loader import TrainBatches
from plumbline.data.opening import open_source
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tasks.file import FileConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.data.tokenizer_making import tokenizer_folder
from plumbline.data.tokenizers import tokenizer_sha256
from tests.data.made import opened_splits

END = 256
"""End of text, among bytes."""
SUMS = [{"prompt": f"{one} + {other} =", "answer": str(one + other)} for one in range(9) for other in range(8, 12)]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*entries: Any, name: str = "examples.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(entry if isinstance(entry, str) else f"{json.dumps(entry)}\n" for entry in entries))
        return str(path)

    return write


@pytest.fixture
def text(tmp_path: Path) -> Corpus:
    """Return a corpus with a tokenizer of its own."""
    source = tmp_path / "text.txt"
    source.write_text("one plus two is three and more of the like\n" * 200)
    prepare(Request(Sources((str(source),)), "train-bpe:300", tmp_path / "text", workers=1))
    return open_corpus(tmp_path / "text")


def spelled(task: FileConfig, number: int) -> tuple[bytes, list[int]]:
    """Return what is read up to the first answer, and the answer's tokens, of a task in bytes."""
    tokens, labels = task.example("train", number)
    start = int(np.argmax(labels >= 0))
    assert (labels[start:] >= 0).all()
    assert tokens[start + 1 :].tolist() == labels[start:-1].tolist(), "what is read of an answer is the answer"
    return bytes(tokens[: start + 1].tolist()), labels[start:].tolist()


def test_labels_are_on_the_answer_and_the_end_of_text(write: Write) -> None:
    task = FileConfig(
        path=write({"prompt": "2 + 3 =", "answer": "5"}, "\n", {"prompt": "é", "answer": "<|endoftext|>"})
    )
    assert task.num_examples("train") == task.num_examples("validation") == 2
    assert spelled(task, 0) == (b"2 + 3 =\n", [ord("5"), END])
    assert spelled(task, 1) == ("é\n".encode(), [*b"<|endoftext|>", END]), "written in a text, it is text"
    assert (task.vocab_size, task.longest) == (257, 3 + 13)
    tokens, labels = task.example("validation", 0)
    assert tokens.dtype == labels.dtype == np.int64


def test_keys_and_template_say_how_an_example_is_written(write: Write) -> None:
    entry = {"question": "{answer}?", "steps": "so {prompt}", "prompt": 3}
    task = FileConfig(
        path=write(entry), prompt_key="question", answer_key="steps", template="Q: {prompt}\nA: {answer}.\n"
    )
    assert spelled(task, 0) == (b"Q: {answer}?\nA: ", [*b"so {prompt}.\n", END])


def test_any_tokenizer_spells_the_examples(write: Write, text: Corpus) -> None:
    """The prompt by itself, as generate.py asks it, then the answer."""
    task = FileConfig(path=write(*SUMS), tokenizer=str(text.tokenizer_path))
    tokenizer = AutoTokenizer.from_pretrained(text.tokenizer_path)
    for number, entry in enumerate(SUMS):
        tokens, labels = task.example("train", number)
        start = int(np.argmax(labels >= 0))
        assert tokens[: start + 1].tolist() == tokenizer.encode(entry["prompt"] + "\n")
        assert labels[start:].tolist() == [*tokenizer.encode(entry["answer"]), tokenizer.eos_token_id]
    source = TaskSource(task)
    assert source.tokenizer_path == text.tokenizer_path
    assert source.tokenizer_sha256 == text.tokenizer_sha256
    assert source.vocab_size == text.vocab_size


def test_a_tokenizer_of_bytes_is_that_of_a_corpus_of_bytes(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("some text\n" * 100)
    prepare(Request(Sources((str(source),)), "byte", tmp_path / "bytes", workers=1))
    folder = tokenizer_folder("byte")
    assert tokenizer_sha256(folder) == open_corpus(tmp_path / "bytes").tokenizer_sha256
    assert AutoTokenizer.from_pretrained(folder).encode("ab") == [97, 98], "it is a folder that transformers loads"
    assert tokenizer_folder("byte") == folder


def test_a_tokenizer_of_another_class_is_adopted_as_a_corpus_does(write: Write, text: Corpus, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    AutoTokenizer.from_pretrained(text.tokenizer_path).save_pretrained(foreign)
    config = json.loads((foreign / "tokenizer_config.json").read_text())
    (foreign / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    again = tmp_path / "again.txt"
    again.write_text("one and two\n" * 100)
    prepare(Request(Sources((str(again),)), str(foreign), tmp_path / "again", workers=1))
    task = TaskSource(FileConfig(path=write(*SUMS), tokenizer=str(foreign)))
    assert task.tokenizer_path != foreign
    assert task.tokenizer_sha256 == open_corpus(tmp_path / "again").tokenizer_sha256


def test_what_is_too_long_names_its_line_or_is_left_out_and_counted(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("plumbline"), "propagate", True)  # where caplog listens
    path = write(
        {"prompt": "ab", "answer": "c"}, "\n", {"prompt": "long", "answer": "longer"}, {"prompt": "a", "answer": "d"}
    )
    stream = TaskSource(FileConfig(path=path)).splits["train"]
    with pytest.raises(ValueError, match=r"examples.jsonl, line 3, which has 11 tokens; set it to 11 or more.* = 10"):
        stream.training_windows(10)
    assert stream.training_windows(11) == 3
    with caplog.at_level(logging.INFO):
        kept = FileConfig(path=path, max_tokens=4)
        assert [spelled(kept, number)[0] for number in range(kept.num_examples("train"))] == [b"ab\n", b"a\n"]
    assert f"{path}: 1 of 3 examples left out" in caplog.text
    assert kept.longest == 4
    with pytest.raises(ValueError, match=r"no examples of max_tokens = 2 or fewer, 3 longer ones; raise it"):
        TaskSource(FileConfig(path=path, max_tokens=2))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "answer": "b"}\n', '{"prompt"\n'], r"line 2: not JSON \(.*; each line is an object"),
        (["[" * 100_000], r"line 1: not JSON \(it is nested too deeply\)"),
        (["[1]\n"], "line 1: a list, not an object"),
        (['{"prompt": "a", "label": "b"}\n'], r"line 1: answer: missing; there are \['prompt', 'label'\]"),
        (
            ['{"prompt": "a", "answer": "b"}\n{"prompt": "\\ud83d", "answer": ""}'],
            "line 2: prompt: half a surrogate pair",
        ),
        (['\n{"prompt": "a", "answer": 5}\n'], "line 2: answer: 5 is no text; each line .* answer_key = answer"),
        ([], "no examples"),
    ],
)
def test_a_line_that_is_not_in_the_format_is_named(write: Write, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"examples\.jsonl(: |, ){message}"):
        open_source(SourceConfig.model_validate({"task": {"name": "file", "path": write(*lines)}}))


def test_an_example_without_anything_to_read_is_refused(write: Write) -> None:
    task = FileConfig(path=write({"prompt": "", "answer": "b"}), template="{prompt}{answer}")
    with pytest.raises(ValueError, match="line 1: prompt: nothing to read before the answer"):
        TaskSource(task)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"template": "{answer}"}, "give {prompt} once and, behind it, {answer} once"),
        ({"template": "{answer} {prompt}"}, "give {prompt} once"),
        ({"template": "{prompt} {answer} {answer}"}, "give {prompt} once"),
        (
            {"template": "{prompt} {input}\n{answer}"},
            r"template = '{prompt} {input}\\n{answer}': {input} is not filled in",
        ),
        ({"tokenizer": "train-bpe:300"}, "tokenizer = train-bpe:300: is not trained on a task; give byte, a folder or"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_keys_that_make_no_sense_are_refused_before_the_file_is_read(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FileConfig.model_validate({"path": "is/not/there.jsonl", **keys})


def test_an_answer_of_nothing_is_refused(write: Write) -> None:
    """It would teach the model to end at once, in silence."""
    with pytest.raises(ValueError, match="line 2: answer: empty"):
        TaskSource(FileConfig(path=write(SUMS[0], {"prompt": "x", "answer": ""})))


@pytest.mark.parametrize("pack", [gzip.compress, partial(pyarrow.compress, codec="zstd", asbytes=True)])
def test_a_packed_file_is_called_packed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.jsonl").write_bytes(pack(b'{"prompt": "x", "answer": "y"}\n'))
    with pytest.raises(ValueError, match=r"a\.jsonl: is packed \(gzip or zstd\); unpack it"):
        TaskSource(FileConfig(path=str(tmp_path / "a.jsonl")))


def test_what_is_not_there_is_named(write: Write) -> None:
    with pytest.raises(ValueError, match=r"no/file\.jsonl: cannot be read \(No such file"):
        TaskSource(FileConfig(path="no/file.jsonl"))
    with pytest.raises(ValueError, match=r"examples\.jsonl: task\.tokenizer = no/folder: no such folder; of the hub"):
        TaskSource(FileConfig(path=write(*SUMS), tokenizer="no/folder"))


def test_a_fingerprint_follows_contents_keys_and_tokenizer_and_not_where_they_lie(write: Write, text: Corpus) -> None:
    path = write(*SUMS)
    base = FileConfig(path=path)
    others = [
        FileConfig(path=write(*SUMS[:-1], name="fewer.jsonl")),
        FileConfig(path=path, tokenizer=str(text.tokenizer_path)),
        FileConfig(path=path, template="{prompt} {answer}"),
        FileConfig(path=path, max_tokens=9),
        FileConfig(path=path, prompt_key="answer"),
    ]
    assert len({task.fingerprint for task in [base, *others]}) == 1 + len(others)
    moved = FileConfig(path=write(*SUMS, name="moved.jsonl"), tokenizer=str(tokenizer_folder("byte")))
    assert moved.fingerprint == base.fingerprint


def test_another_question_is_another_prompt_before_the_same_answer(write: Write) -> None:
    task = FileConfig(path=write(*SUMS))
    prompts = {(entry["prompt"] + "\n").encode() for entry in SUMS}
    for number in range(len(SUMS)):
        prompt, answer = spelled(task, number)
        tokens, labels = task.with_another_question("validation", number)
        start = int(np.argmax(labels >= 0))
        asked = bytes(tokens[: start + 1].tolist())
        assert asked in prompts - {prompt}
        assert labels[start:].tolist() == answer
        assert len(tokens) <= task.longest
    alone = FileConfig(path=write(SUMS[0], name="alone.jsonl"))
    assert [part.tolist() for part in alone.with_another_question("train", 0)] == [
        part.tolist() for part in alone.example("train", 0)
    ]


def data(*train: dict[str, Any], validation: list[dict[str, Any]] | None = None) -> DataConfig:
    sizes = {"sequence_length": 24, "global_batch_size": 8, "micro_batch_size": 4}
    return DataConfig.model_validate({"train": list(train), "validation": validation or [], **sizes})


def test_a_file_is_mixed_with_a_corpus_of_its_tokenizer_and_of_no_other(write: Write, text: Corpus) -> None:
    corpus: dict[str, Any] = {"path": str(text.path)}
    good: dict[str, Any] = {"task": {"name": "file", "path": write(*SUMS), "tokenizer": str(text.tokenizer_path)}}
    bad: dict[str, Any] = {"task": {"name": "file", "path": write(*SUMS)}}
    batches = TrainBatches(data(corpus, good), seed=0)
    rows = {int(row) for batch in batches.micro_batches(5) for row in (batch["labels"] == -100).any(1)}
    assert rows == {0, 1}, "samples of text, all of whose tokens have labels, and of the task"
    remedy = f"give file task.tokenizer = {text.tokenizer_path}$"
    for sources in ([corpus, bad], [bad, corpus]):
        with pytest.raises(ValueError, match=f"made with different tokenizers; {remedy}"):
            TrainBatches(data(*sources), seed=0)
    with pytest.raises(ValueError, match=r"give file and other the same task\.tokenizer"):
        TrainBatches(data(bad, good | {"name": "other"}), seed=0)
    assert list(opened_splits(data(corpus, validation=[good]))) == ["file"]
    with pytest.raises(ValueError, match=remedy):
        opened_splits(data(corpus, validation=[bad]))


def test_no_part_of_a_file_is_held_out(write: Write) -> None:
    train = {"task": {"name": "file", "path": write(*SUMS)}}
    other = {"task": {"name": "file", "path": write(*SUMS[:5], name="other.jsonl")}, "name": "sums"}
    assert not opened_splits(data(train))
    config = data(train, validation=[other])
    assert list(opened_splits(config)) == list(config.held_out_tasks) == ["sums"]
    assert opened_splits(config)["sums"].evaluation_windows(24) == 5
