"""Tasks as sources of samples: one example for each sample, in an order and on ranks like windows of text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plumbline.data.config import DataConfig
from plumbline.data.corpus import Corpus
from plumbline.data.loader import TrainBatches, ValidationBatches
from plumbline.data.opening import open_corpora
from plumbline.data.tasks import source
from plumbline.data.tasks.addition import AdditionConfig
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.file import FileConfig
from plumbline.data.tasks.retrieval import RetrievalConfig
from plumbline.data.tasks.source import EXAMPLE_BYTES, TOKEN_BYTES, TaskSource, TaskStream
from plumbline.data.tasks.task import Example
from tests.data.made import opened_splits

MakePair = Callable[..., Corpus]

TASK = RetrievalConfig(pairs=3, queries=1, keys=8, values=8)  # 4, 6 or 8 tokens
RETRIEVAL = {"task": TASK.model_dump()}
ADDITION: dict[str, Any] = {"task": {"name": "addition", "digits": 2}}


def data(*train: dict[str, Any], length: int = 8, batch: int = 8, micro: int = 2) -> DataConfig:
    sizes = {"sequence_length": length, "global_batch_size": batch, "micro_batch_size": micro}
    return DataConfig.model_validate({"train": list(train), **sizes})


def test_a_sample_is_one_example_and_padding_of_its_own() -> None:
    batches = TrainBatches(data(RETRIEVAL, length=9, batch=32, micro=32), seed=4)
    (batch,) = batches.micro_batches(7)
    located = batches.order.locate(batch["sample_index"].numpy())
    lengths = set()
    for row, number in enumerate(located.window.tolist()):
        tokens, labels = TASK.example("train", number)
        size = len(tokens)
        padding = 9 - size
        assert batch["input_ids"][row].tolist() == [*tokens.tolist(), *[0] * padding]
        assert batch["labels"][row].tolist() == [*labels.tolist(), *[-100] * padding]
        assert batch["document_ids"][row].tolist() == [0] * size + [1] * padding
        assert batch["positions"][row].tolist() == [*range(size), *range(padding)]
        lengths.add(size)
    assert lengths == {4, 6, 8}
    assert len(set(located.window.tolist())) == 32


def test_an_example_may_fill_the_sample() -> None:
    (batch,) = TrainBatches(data(ADDITION, length=8, micro=8), seed=0).micro_batches(0)
    assert AdditionConfig(digits=2).longest == 8
    assert batch["document_ids"].unique().tolist() == [0]
    assert batch["positions"][0].tolist() == list(range(8))
    assert (batch["labels"] >= 0).sum(1).tolist() == [3] * 8


@pytest.mark.parametrize(("micro", "world"), [(2, 1), (1, 4), (3, 2)])
def test_a_step_holds_the_same_samples_for_every_world_size(make_pair: MakePair, micro: int, world: int) -> None:
    """Of a mixture of two tasks and a text, at a step far out."""
    text = {"path": str(make_pair([500]).path), "weight": 0.5}

    def rows(micro: int, world: int) -> dict[int, list[list[int]]]:
        config = data(RETRIEVAL, ADDITION, text, batch=12, micro=micro)
        return {
            int(number): [tokens.tolist(), labels.tolist()]
            for rank in range(world)
            for part in TrainBatches(config, 3, rank, world).micro_batches(10**9)
            for number, tokens, labels in zip(part["sample_index"], part["input_ids"], part["labels"], strict=True)
        }

    alone = rows(12, 1)
    assert sorted(alone) == list(range(12 * 10**9, 12 * 10**9 + 12))
    assert rows(micro, world) == alone


def test_a_mixture_holds_its_proportions(make_pair: MakePair) -> None:
    text = {"path": str(make_pair([500]).path)}
    batches = TrainBatches(data(RETRIEVAL | {"weight": 2.0}, ADDITION | {"name": "sums"}, text), seed=0)
    assert batches.order.samples_per_source(400) == {"retrieval": 200, "sums": 100, "tokens": 100}
    assert list(batches.corpora) == ["retrieval", "sums", "tokens"]


def test_the_order_follows_the_seed_of_the_run_and_the_examples_that_of_the_task() -> None:
    first, second = (TrainBatches(data(RETRIEVAL), seed).micro_batches(0)[0] for seed in (1, 2))
    assert not torch.equal(first["input_ids"], second["input_ids"])
    held_out = [list(ValidationBatches(TaskSource(TASK).held_out, 8, 4, 1)) for _ in range(2)]
    assert torch.equal(held_out[0][0]["input_ids"], held_out[1][0]["input_ids"])


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_reads_held_out_examples_once_and_pads_the_last_batches(world: int) -> None:
    split = opened_splits(data(RETRIEVAL))["retrieval"]
    ranks = [ValidationBatches(split, 8, 4, 5, rank, world) for rank in range(world)]
    batches = [batch for rank in ranks for batch in rank]
    numbers = torch.cat([batch["sample_index"] for batch in batches])
    assert sorted(numbers[numbers >= 0].tolist()) == [number * 4096 // 20 for number in range(20)]
    for batch in batches:
        for number, tokens, labels in zip(batch["sample_index"], batch["input_ids"], batch["labels"], strict=True):
            example = TASK.example("validation", int(number)) if number >= 0 else None
            size = 0 if example is None else len(example.tokens)
            assert tokens[:size].tolist() == ([] if example is None else example.tokens.tolist())
            assert labels[:size].tolist() == ([] if example is None else example.labels.tolist())
            assert set(labels[size:].tolist()) <= {-100}


def test_memorization_is_tested_on_what_it_is_trained_on() -> None:
    config = data({"task": {"name": "memorization", "entries": 24, "symbols": 5}}, length=2, batch=24, micro=24)
    batches = TrainBatches(config, seed=0)
    held_out = ValidationBatches(opened_splits(config)["memorization"], 2, 24)
    assert held_out.num_windows == 24
    tested = next(iter(held_out))["input_ids"].tolist()
    for epoch in range(2):
        assert sorted(batches.micro_batches(epoch)[0]["input_ids"].tolist()) == sorted(tested)
    assert batches.epochs(2) == {"memorization": 2.0}


FIXED: dict[str, Any] = {"task": TASK.model_dump() | {"examples": 12}}


def test_a_fixed_set_of_examples_is_read_whole_in_every_epoch_and_in_another_order() -> None:
    batches = TrainBatches(data(FIXED, batch=6, micro=3), seed=0)
    whole = [TASK.example("train", number) for number in range(12)]
    orders = []
    for epoch in range(3):
        read = [part for step in (2 * epoch, 2 * epoch + 1) for part in batches.micro_batches(step)]
        rows = [row.tolist() for part in read for row in part["input_ids"]]
        assert sorted(rows) == sorted([*tokens.tolist(), *[0] * (8 - len(tokens))] for tokens, _ in whole)
        orders.append(str(rows))
    assert len(set(orders)) == 3
    assert batches.epochs(6) == {"retrieval": 3.0}
    (split,) = opened_splits(data(FIXED)).values()
    assert split.evaluation_windows(8) == 4096, "held out are as many as ever"


@pytest.mark.parametrize("another_question", [False, True])
def test_what_is_read_often_is_computed_once(monkeypatch: pytest.MonkeyPatch, another_question: bool) -> None:
    drawn = []
    draw = RetrievalConfig.draw

    def counted(task: RetrievalConfig, draws: Draws) -> Example:
        drawn.append(draws)
        return draw(task, draws)

    monkeypatch.setattr(RetrievalConfig, "draw", counted)
    fixed = TASK.model_copy(update={"examples": 12})
    streams = [TaskStream(fixed, "train", another_question), TaskStream(TASK, "train", another_question)]
    for stream, again in zip(streams, (False, True), strict=True):
        first = stream.read(5, 8)
        before = len(drawn)
        second = stream.read(5, 8)
        assert (len(drawn) > before) == again, "of endless examples none is kept"
        assert [part.tolist() for part in first] == [part.tolist() for part in second]
        assert stream.read(6, 8).inputs.tolist() != first.inputs.tolist()


def test_what_is_kept_has_a_limit_and_a_file_is_not_kept_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fixed = TaskStream(TASK.model_copy(update={"examples": 12}), "train")
    monkeypatch.setattr(source, "KEPT_BYTES", 5 * (EXAMPLE_BYTES + TOKEN_BYTES * TASK.longest))
    (tmp_path / "file.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 12)
    of_file = TaskStream(FileConfig(path=str(tmp_path / "file.jsonl")), "train")
    for stream, kept in ((fixed, 5), (of_file, 0)):
        windows = [[stream.read(number, 16).inputs.tolist() for number in range(12)] for _ in range(2)]
        assert windows[0] == windows[1]
        assert len(stream._kept) == kept


def test_a_sequence_that_is_too_short_is_refused_with_the_length_that_is_needed() -> None:
    message = r"data\.sequence_length 7 is too short for task retrieval, .* has 8 tokens; set it to 8 or more"
    with pytest.raises(ValueError, match=message):
        TrainBatches(data(RETRIEVAL, length=7), seed=0)
    with pytest.raises(ValueError, match=message):
        ValidationBatches(TaskSource(TASK).held_out, 7, 2)


def test_two_tasks_need_two_names_and_two_contents() -> None:
    with pytest.raises(ValueError, match=r"two corpora are named 'retrieval' \(task retrieval and task retrieval\)"):
        open_corpora(data(RETRIEVAL, RETRIEVAL).train)
    with pytest.raises(ValueError, match="retrieval and again hold the same tokens"):
        TrainBatches(data(RETRIEVAL, RETRIEVAL | {"name": "again"}), seed=0)
