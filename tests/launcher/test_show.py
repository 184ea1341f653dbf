"""Looking at a corpus: what show.py prints for people and for programs, and that a text cannot control a terminal."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plumbline.data.finding import Found
from plumbline.data.indexed import IndexedWriter
from plumbline.data.tasks.retrieval import RetrievalConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.data.tokenizer_making import tokenizer_folder
from plumbline.data.tokenizers import Decoder
from plumbline.launcher.runtime.commands.cli import escaped
from plumbline.launcher.runtime.inspection.found import read_lines
from plumbline.launcher.runtime.inspection.samples import Sample, spread
from plumbline.launcher.runtime.inspection.seen import Read
from plumbline.launcher.runtime.inspection.text import CUT, block, sample_lines

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bare pair of documents of 5, 20 and 40 tokens."""
    prefix = tmp_path_factory.mktemp("pair") / "tokens"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(65) % 9, [5, 20, 40])
    return prefix


def test_a_corpus_is_counted_and_sampled(command: Command, corpus: Path) -> None:
    facts = json.loads(command("show", corpus, "--json").stdout)
    manifest = json.loads((corpus / "corpus.json").read_text())
    assert (facts["tokenizer"], facts["vocab_size"]) == ("byte", 257)
    for name, split in facts["sources"]["email"]["splits"].items():
        known = {key: count for key, count in manifest["splits"][name].items() if key != "shards"}
        assert {key: split[key] for key in known} == known
        assert split["counted_tokens"] == split["tokens"]
        assert sum(row["documents"] for row in split["document_lengths"]) == split["documents"]
        counts = [row["count"] for row in split["frequent_tokens"]]
        assert counts == sorted(counts, reverse=True)
        assert split["frequent_tokens"][0] | {"count": 0} == {"token": 32, "text": " ", "count": 0}
    assert len(facts["samples"]) == 3
    for sample in facts["samples"]:
        assert bytes(sample["tokens"]).decode() == "".join(document["text"] for document in sample["documents"])

    text = command("show", corpus).stdout
    train = manifest["splits"]["train"]
    assert f"train: {train['documents']:,} documents, {train['tokens']:,} tokens, " in text
    assert "  | " in text


def test_a_bare_pair_is_shown_as_far_as_it_is_known(command: Command, pair: Path) -> None:
    facts = json.loads(command("show", pair, "--json").stdout)
    split = facts["sources"]["tokens"]["splits"]["train"]
    assert (split["documents"], split["tokens"], split["source_bytes"], facts["vocab_size"]) == (3, 65, None, None)
    assert [row["documents"] for row in split["document_lengths"]] == [1, 0, 1, 1]
    (sample,) = facts["samples"]
    assert sample["tokens"] == [number % 9 for number in range(64)]
    assert sample["documents"] == [{"begins": begin, "text": None} for begin in (0, 5, 25)]
    text = command("show", pair).stdout
    assert "0 1 2 3 4\n  | 5 6 7 8 0 1 2 3 4 5" in text
    refused = command("show", pair, "--find", "x")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has no tokenizer, so no text can be found in it" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rank", "1"), "--rank goes with --step"),
        (("--rank", "0"), "--rank goes with --step"),
        (("--loss",), "--loss goes with --step"),
        (("--step", "1", "--checkpoint", "."), "--checkpoint goes with --loss"),
        (("--step", "1", "--device", "cpu"), "--device goes with --loss"),
        (("--dtype", "bf16"), "--dtype goes with --loss"),
        (("--find", "a", "--full"), "--full shows samples in full, and --find none"),
        (("--step", "1", "--world-size", "2"), "--world-size goes with --rank"),
        (("--step", "1"), "tokens is no run (no config.yaml), so it has no steps"),
        (("--step", "0"), "0 is less than 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    command: Command, pair: Path, words: tuple[str, ...], message: str
) -> None:
    refused = command("show", pair, *words)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_nothing_in_a_text_reaches_the_terminal_as_a_command() -> None:
    text = "\x1b[2Jred\a \u202eright to left\r\x00 tab\t é 漢 🙂"
    assert escaped(text) == "\\x1b[2Jred\\x07 \\u202eright to left\\r\\x00 tab\\t é 漢 🙂"
    assert list(block("one\n\x1btwo", full=False)) == ["  | one", "  | \\x1btwo"]
    (line, more) = block("x" * (CUT + 5), full=False)
    assert (line, more) == (f"  | {'x' * CUT}", "  ... 5 more characters (--full)")
    assert list(block("x" * (CUT + 5), full=True)) == [f"  | {'x' * (CUT + 5)}"]


def test_documents_and_answers_are_told_apart() -> None:
    decoder = Decoder(tokenizer_folder("byte"))
    text = Sample(
        "web", 7, [*b"end.", 256, *b"new"], [*b"nd.", 256, *b"newx"], [0, 5], has_answers=False, number=3, epoch=1
    )
    assert list(sample_lines(text, decoder, full=False)) == [
        "sample 3  web, epoch 1, window 7: 8 tokens, 2 documents",
        "  | end.<|endoftext|>",
        "  -- a document begins at token 5",
        "  | new",
    ]
    task = Sample("sums", 0, [*b"1+1=", *b"2"], [-100, -100, -100, ord("2"), 256], [0], has_answers=True)
    assert list(sample_lines(task, decoder, full=False))[1:] == ["  | 1+1=", "  answer", "  | 2<|endoftext|>"]


def test_answers_of_a_task_without_text_stand_in_brackets() -> None:
    """As data/tasks/README.md writes examples: an answer that is read, and the last one, which is not."""
    task = RetrievalConfig(pairs=2, queries=2, keys=4, values=3)
    answers = set()
    for sample in spread("retrieval", TaskSource(task).splits["train"], 8, 16):
        tokens, labels = (part.tolist() for part in task.example("train", sample.window))
        assert sample.tokens == tokens
        words = [str(tokens[0])]
        for token, label in zip([*tokens[1:], None], labels, strict=True):
            words.append(f"[{label}]" if label != -100 else str(token))
        (_, line) = sample_lines(sample, None, full=False)
        assert line == f"  | {' '.join(words)}"
        answers.add(line.count("["))
    assert answers == {1, 2}


def test_it_is_said_where_a_text_was_not_looked_for() -> None:
    run: Any = SimpleNamespace(plan=SimpleNamespace(total_steps=9), last_step=9)
    reads = [Read(step, step, 0, step, step == 1) for step in (1, 2)]
    for more, words in ((False, ""), (True, ", where it may hold more of the text,")):
        *_, last = read_lines(run, Found(0, 99, [1, 2], [1], more), reads)
        assert last.startswith(f"  the rest of its document{words} in steps 2")
