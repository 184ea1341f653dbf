"""What show.py says that a run saw is what its engine was given, on each rank and in each step."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

import plumbline.launcher.eval
import plumbline.launcher.generate
import plumbline.launcher.show
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tasks.file import read
from plumbline.launcher.runtime.models.open import load_model
from tests.conftest import Run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Start

STEPS, LENGTH, RANKS = 12, 32, 2
END = 256
TEXT = ["the quick brown fox jumps over document ", "a lazy dog sleeps beside number ", "é and 漢字 come in "]
SUMS = [{"prompt": f"{one} + {other} =", "answer": str(one + other)} for one in range(4) for other in range(4)]
ADDITION = "{name: addition, digits: 2}"


@dataclass(frozen=True)
class Recorded:
    """Hold a run, and what its ranks were given: step as in metrics.jsonl -> samples."""

    run: Run
    ranks: list[dict[int, list[dict[str, Any]]]]
    task: Path


@pytest.fixture(scope="module")
def recorded(start: Start, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Train on text, a file of prompts and a synthetic task, with a smaller batch at first, on two ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "text").mkdir()
    for number in range(18):
        (folder / "text" / f"{number:02}.txt").write_text(f"{TEXT[number % 3]}{number}\n", encoding="utf-8")
    prepare(Request(Sources((str(folder / "text"),)), "byte", folder / "corpus", workers=1))
    task = folder / "sums.jsonl"
    task.write_text("".join(f"{json.dumps(entry)}\n" for entry in SUMS))
    file = f"{{task: {{name: file, path: {task}}}}}"
    arguments = [
        *("--config", tiny_config, f"run.root={folder}", "run.name=seen", f"data.validation=[{file}]"),
        f"data.train=[{{path: {folder}/corpus, weight: 2}}, {file}, {{task: {ADDITION}}}]",
        *(f"data.sequence_length={LENGTH}", "data.global_batch_size=8", "data.micro_batch_size=2"),
        "data.batch_size_warmup=[{tokens: 200, global_batch_size: 4}]",
        *(f"train.steps={STEPS}", "train.eval_interval=12", "checkpoint.interval=1", "checkpoint.keep_last=12"),
    ]
    program = __file__.replace("test_show", "record_batches")
    outcome = start(program, [folder, *arguments], folder / "seen", ranks=RANKS).wait()
    assert outcome.code == 0, outcome.stderr
    ranks: list[dict[int, list[dict[str, Any]]]] = []
    for rank in range(RANKS):
        steps: dict[int, list[dict[str, Any]]] = {}
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            steps.setdefault(row["completed"] + 1, []).append(row)  # the step that this update ends in
        ranks.append(steps)
    return Recorded(outcome.run, ranks, task)


Show = Callable[..., Any]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return what runs show.py and returns its JSON document."""

    def run(*words: object) -> Any:
        monkeypatch.setattr(sys, "argv", ["show", *map(str, words), "--json"])
        capsys.readouterr()
        plumbline.launcher.show.main()
        return json.loads(capsys.readouterr().out)

    return run


def unpadded(row: dict[str, Any]) -> list[int]:
    """Return the tokens of a recorded sample that are not padding: of a task, those up to its last answer."""
    if -100 not in row["labels"]:
        return list(row["tokens"])
    return list(row["tokens"][: max(place for place, label in enumerate(row["labels"]) if label != -100) + 1])


def test_a_step_is_what_the_engine_was_given(recorded: Recorded, show: Show) -> None:
    """Of both sizes of the batch: each rank's samples in its order, and those of all in the order of their numbers."""
    kinds = set()
    for step in (1, 2, 3, 7, STEPS):
        everything = []
        for rank, given in enumerate(recorded.ranks):
            shown = show(recorded.run.folder, "--step", step, "--rank", rank)
            assert [sample["sample"] for sample in shown["samples"]] == [row["sample"] for row in given[step]]
            assert [sample["tokens"] for sample in shown["samples"]] == [unpadded(row) for row in given[step]]
            everything += given[step]
        shown = show(recorded.run.folder, "--step", step)
        everything.sort(key=lambda row: row["sample"])
        assert [sample["sample"] for sample in shown["samples"]] == [row["sample"] for row in everything]
        assert [sample["tokens"] for sample in shown["samples"]] == [unpadded(row) for row in everything]
        assert len(everything) == (4 if step <= 2 else 8)
        kinds |= {sample["source"] for sample in shown["samples"]}
        for sample, row in zip(shown["samples"], everything, strict=True):
            check_text(sample, row)
    assert kinds == {"corpus", "file", "addition"}


def check_text(sample: dict[str, Any], row: dict[str, Any]) -> None:
    """Compare the texts of a sample with its bytes."""
    answer = [label for label in row["labels"] if label != -100]
    if sample["source"] == "addition":
        assert sample["documents"] == [{"begins": 0, "text": None}]
        assert (sample["answer_tokens"], sample["answer"]) == (answer, None)
        return
    if sample["source"] == "file":
        assert {"prompt": sample["prompt"][:-1], "answer": sample["answer"].removesuffix("<|endoftext|>")} in SUMS
        assert sample["answer_tokens"] == answer
        return
    tokens = row["tokens"]
    begins = [0, *(place for place in range(1, LENGTH) if tokens[place - 1] == END)]
    assert [document["begins"] for document in sample["documents"]] == begins
    for first, stop, document in zip(begins, [*begins[1:], LENGTH], sample["documents"], strict=True):
        told = document["text"].removesuffix("<|endoftext|>")
        assert told == bytes(token for token in tokens[first:stop] if token != END).decode(errors="replace")


def test_the_loss_of_a_step_is_that_of_its_samples(recorded: Recorded, show: Show) -> None:
    """By the weights before the step, whose number metrics.jsonl gives to the state after it."""
    folder = recorded.run.folder
    losses = recorded.run.column("loss")
    for step in (2, 9):
        shown = show(folder, "--step", step, "--loss", "--device", "cpu")
        assert shown["checkpoint_step"] == step - 1
        assert shown["recorded_loss"] == losses[step]
        assert shown["loss"] == pytest.approx(losses[step], rel=1e-5)
        found = [sample["loss"] for sample in shown["samples"]]
        assert found == sorted(found, reverse=True)
    model = load_model(folder / "checkpoints" / "step_00000008", torch.device("cpu"))
    rows = {row["sample"]: row for given in recorded.ranks for row in given[9]}
    assert len(shown["samples"]) == len(rows)
    for sample in shown["samples"]:
        row = rows[sample["sample"]]
        with torch.no_grad():
            logits = model.module(torch.tensor([row["tokens"]]))[0]
        labels = torch.tensor(row["labels"])
        nats = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        assert sample["loss"] == pytest.approx(float(nats.sum() / (labels >= 0).sum()), rel=1e-5)
        worst = sample["worst"][0]
        assert worst["nats"] == pytest.approx(float(nats.max()), rel=1e-5)
        assert worst["token"] == row["labels"][worst["position"]]


def test_a_step_is_scored_by_the_checkpoint_before_it_or_the_one_given(recorded: Recorded, show: Show) -> None:
    folder = recorded.run.folder
    with pytest.raises(ValueError, match=r"--loss of step 1: .* no whole checkpoint of a step before it .*1, 2, 3"):
        show(folder, "--step", 1, "--loss")
    later = folder / "checkpoints" / "step_00000012"
    trained = show(folder, "--step", 9, "--loss", "--checkpoint", later, "--device", "cpu")
    assert trained["checkpoint_step"] == 12
    assert trained["loss"] < show(folder, "--step", 9, "--loss", "--device", "cpu")["loss"]


def test_find_names_all_steps_that_read_a_document(recorded: Recorded, show: Show) -> None:
    """Compared with the samples of every step, of which three epochs of the corpus are made."""
    folder = recorded.run.folder
    seen = [(step, sample) for step in range(1, STEPS + 1) for sample in show(folder, "--step", step)["samples"]]
    for text, documents in (("number 4", 1), ("漢字 come in 8", 1), ("lazy dog", 6)):
        shown = show(folder, "--find", text)
        assert shown["all_found"]
        assert len(shown["found"]) in range(1, documents + 1)  # some may be held out
        for found in shown["found"]:
            reads = {(read["step"], read["sample"], read["epoch"], read["window"]) for read in found["reads"]}
            assert reads == {
                (step, sample["sample"], sample["epoch"], sample["window"])
                for step, sample in seen
                if sample["source"] == "corpus" and sample["window"] in found["windows"]
            }
            assert len({epoch for _, _, epoch, _ in reads}) >= 2
            assert found["windows"] == list(range(found["first"] // LENGTH, (found["stop"] - 1) // LENGTH + 1))
    shown = show(folder, "--find", "2 + 3 =")
    assert [(found["source"], found["first"]) for found in shown["found"]] == [("file", 11)]
    of_example = [(read["step"], read["sample"]) for read in shown["found"][0]["reads"]]
    assert of_example == [
        (step, sample["sample"]) for step, sample in seen if sample["source"] == "file" and sample["window"] == 11
    ]
    assert show(folder, "--find", "nobody wrote this")["found"] == []


def test_a_run_is_shown_with_its_sources(
    recorded: Recorded, show: Show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded.run.folder
    facts = show(folder)
    samples = {name: source["samples"] for name, source in facts["sources"].items()}
    assert samples == {"corpus": 44, "file": 22, "addition": 22}
    assert sum(samples.values()) == 2 * 4 + 10 * 8
    assert facts["last_step"] == facts["steps"] == STEPS
    lengths = facts["sources"]["corpus"]["splits"]["train"]["document_lengths"]
    assert sum(row["documents"] for row in lengths) == facts["sources"]["corpus"]["splits"]["train"]["documents"]
    monkeypatch.setattr(sys, "argv", ["show", str(folder), "--step", "3"])
    plumbline.launcher.show.main()
    text = capsys.readouterr().out
    assert text.startswith(f"step 3 of {folder}: 8 samples from 8 to 15, on which update 3 trained; its loss in")
    assert "answer\n  | " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", 13), r"--step 13: .* has steps 1 to 12"),
        (("--step", 3, "--rank", 2), r"--rank 2: there were 2 rank\(s\), from 0 on"),
        (("--step", 3, "--rank", 0, "--world-size", 3), "not a multiple of the world size 3"),
        (("--find", ""), "--find: an empty text is everywhere"),
    ],
)
def test_what_cannot_be_shown_is_named(recorded: Recorded, show: Show, words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show(recorded.run.folder, *words)


@pytest.mark.parametrize("written", ["[]", '{"world_size": null}', "{}"])
def test_a_number_of_ranks_that_no_file_tells_is_asked_for(
    recorded: Recorded, show: Show, tmp_path: Path, written: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recorded.run.folder, folder, ignore=shutil.ignore_patterns("checkpoints"))
    (folder / "environment.json").write_text(written)
    with pytest.raises(
        ValueError, match=r"environment\.json: does not say how many ranks there were; give --world-size"
    ):
        show(folder, "--step", 3, "--rank", 0)


def test_a_run_on_a_file_is_scored_and_continues_text(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokenizer is in the run folder, whether it came with a corpus or with the task."""
    run = str(recorded.run.folder)
    result = json.loads((recorded.run.folder / "result.json").read_text())
    assert result["eval/file/examples"] == 8, "train.eval_batches = 4 of two"
    words = ["--model", run, "--task", "file", "--device", "cpu", "--batch-size", "2", "--max-batches", "4", "--json"]
    monkeypatch.setattr(sys, "argv", ["eval", *words])
    plumbline.launcher.eval.main()
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(result["eval/file/loss"], rel=1e-5)
    assert found["exact_match"] == result["eval/file/exact_match"]
    monkeypatch.setattr(
        sys, "argv", ["generate", "--model", run, "--prompt", "1 + 2 =\n", "--max-new-tokens", "4", "--json"]
    )
    plumbline.launcher.generate.main()
    assert json.loads(capsys.readouterr().out)["samples"][0]["tokens"]


def test_a_corpus_that_was_replaced_is_not_what_the_run_saw(recorded: Recorded, show: Show) -> None:
    """This process has read the file, once as ever, and has to forget it."""
    text = recorded.task.read_text()
    try:
        recorded.task.write_text(text.replace("2 + 3", "3 + 2"))
        read.cache_clear()
        with pytest.raises(ValueError, match=r"task file: holds other tokens than when .*seen trained on it \(finger"):
            show(recorded.run.folder, "--step", 1)
    finally:
        recorded.task.write_text(text)
        read.cache_clear()
    assert show(recorded.run.folder, "--step", 1)["samples"]
