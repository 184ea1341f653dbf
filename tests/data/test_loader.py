"""Batches: the right tokens, on the right rank, from any step, whatever the world size."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.data.boundaries import KEPT, Boundaries
from plumbline.data.config import DataConfig
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.damage import DamagedFileError
from plumbline.data.indexed import IndexedWriter
from plumbline.data.loader import TrainBatches, ValidationBatches
from plumbline.data.opening import open_corpora
from plumbline.data.prefetch import prefetch
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.streams import Window
from plumbline.data.windows import Batch, gather
from tests.data.made import opened_splits

MakePair = Callable[..., Corpus]
MakeConfig = Callable[..., DataConfig]


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return cast(dict[str, torch.Tensor], batch)


def equal(left: Batch, right: Batch) -> bool:
    return all(torch.equal(value, tensors(right)[key]) for key, value in tensors(left).items())


def samples_of(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in batch["sample_index"].tolist()]


def test_a_batch_is_its_windows(make_pair: MakePair, make_config: MakeConfig) -> None:
    """Tokens are numbered by their place in the stream, so a window shows where it was cut."""
    lengths = [5, 1, 30, 2, 2, 60]
    length = 8
    batches = TrainBatches(make_config(make_pair(lengths), length=length), seed=0)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    seen = set()
    for batch in batches.micro_batches(0):
        assert {key: value.dtype for key, value in tensors(batch).items()} == {
            "input_ids": torch.int64,
            "labels": torch.int64,
            "document_ids": torch.int32,
            "positions": torch.int32,
            "sample_index": torch.int64,
        }
        assert all(value.is_contiguous() for value in tensors(batch).values())
        for row in range(2):
            first = int(batch["input_ids"][row, 0])
            seen.add(first)
            assert first % length == 0
            assert batch["input_ids"][row].tolist() == list(range(first, first + length))
            assert batch["labels"][row].tolist() == list(range(first + 1, first + length + 1))
            document, position = 0, 0
            for place in range(length):
                if place and first + place in starts:
                    document, position = document + 1, 0
                assert batch["document_ids"][row, place] == document
                assert batch["positions"][row, place] == position
                position += 1
    assert len(seen) == 8


def row_by_row(windows: list[Window | None], length: int) -> dict[str, list[list[int]]]:
    """Make a batch as slowly as it is defined."""
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "document_ids": [], "positions": []}
    for window in windows:
        inputs, labels = (window.inputs.tolist(), window.labels.tolist()) if window is not None else ([], [])
        begins = set(window.begins.tolist()) if window is not None else set()
        documents = [sum(begin <= place for begin in begins) for place in range(length)]
        batch["input_ids"].append(inputs + [0] * (length - len(inputs)))
        batch["labels"].append(labels + [-100] * (length - len(labels)))
        batch["document_ids"].append(documents)
        batch["positions"].append([place - max([0, *(b for b in begins if b <= place)]) for place in range(length)])
    return batch


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(lambda one: sum(one) > 1), min_size=2),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_a_batch_of_several_streams_is_what_they_read_one_by_one(
    make_pair: MakePair, lengths: list[list[int]], length: int, data: st.DataObject
) -> None:
    """Windows at the end of a stream are short, documents may be empty, and a row may be padding."""
    streams = [make_pair(each, f"s{number}").splits["train"] for number, each in enumerate(lengths[:3])]
    source = data.draw(st.lists(st.integers(-1, len(streams) - 1), min_size=1, max_size=9))
    window = [data.draw(st.integers(0, max(0, streams[at].evaluation_windows(length) - 1))) for at in source]
    batch = gather(streams, np.array(source), np.array(window), np.arange(len(source)), length)
    read = [None if at < 0 else streams[at].read(number, length) for at, number in zip(source, window, strict=True)]
    for key, rows in row_by_row(read, length).items():
        assert tensors(batch)[key].tolist() == rows, key


def test_documents_are_found_among_more_than_are_kept_in_memory() -> None:
    """Five times as many as are kept, some of them empty, looked for in random stretches."""
    draw = np.random.default_rng(0)
    starts = np.sort(draw.integers(0, 400_000, 5 * KEPT))
    first = draw.integers(0, 399_000, 300)
    last = first + draw.integers(1, 1000, 300)
    stretch, found = Boundaries(starts).within(first, last)
    expected = [starts[(starts > a) & (starts < b)] for a, b in zip(first, last, strict=True)]
    assert found.tolist() == np.concatenate(expected).tolist()
    assert stretch.tolist() == np.repeat(np.arange(300), [len(each) for each in expected]).tolist()


def test_every_token_but_the_first_is_a_target_once_an_epoch(make_pair: MakePair, make_config: MakeConfig) -> None:
    batches = TrainBatches(make_config(make_pair([12 * 8 + 1]), batch=12), seed=3)
    for epoch in range(3):
        labels = [token for batch in batches.micro_batches(epoch) for token in batch["labels"].flatten().tolist()]
        assert sorted(labels) == list(range(1, 97))


@settings(max_examples=40)
@given(
    accumulation=st.integers(1, 3),
    micro=st.integers(1, 3),
    world=st.integers(1, 5),
    step=st.integers(0, 10**9),
    seed=st.integers(0, 100),
)
def test_a_step_holds_the_same_samples_for_every_world_size(
    make_pair: MakePair, make_config: MakeConfig, accumulation: int, micro: int, world: int, step: int, seed: int
) -> None:
    corpora = [make_pair([50, 300], "a"), make_pair([70], "b")]
    batch = accumulation * micro * world

    def rows(micro: int, world: int) -> dict[int, list[int]]:
        config = make_config(*corpora, weights=[0.7, 0.3], batch=batch, micro=micro)
        return {
            int(number): tokens.tolist()
            for rank in range(world)
            for part in TrainBatches(config, seed, rank, world).micro_batches(step)
            for number, tokens in zip(part["sample_index"], part["labels"], strict=True)
        }

    alone = rows(micro=batch, world=1)
    assert sorted(alone) == list(range(step * batch, (step + 1) * batch))
    assert rows(micro, world) == alone


def test_a_growing_batch_takes_the_same_samples_in_the_same_order_for_every_world_size(
    make_pair: MakePair, make_config: MakeConfig
) -> None:
    """Two steps of 4 samples, three of 8, two of 16, then 32: each step the next ones, whoever reads them."""
    stages = [{"tokens": 60, "global_batch_size": 4}, {"tokens": 128, "global_batch_size": 8}]
    stages.append({"tokens": 1, "global_batch_size": 16})
    plain = make_config(make_pair([4000]), batch=32, micro=2)
    growing = DataConfig.model_validate({**plain.model_dump(), "batch_size_warmup": stages})
    constant = TrainBatches(plain.model_copy(update={"global_batch_size": 1, "micro_batch_size": 1}), seed=5)
    labels = {sample: constant.micro_batches(sample)[0]["labels"][0].tolist() for sample in range(96)}
    for world in (1, 2):
        ranks = [TrainBatches(growing, 5, rank, world) for rank in range(world)]
        consumed = 0
        for step, size in enumerate([4, 4, 8, 8, 8, 16, 16, 32]):
            parts = [part for rank in ranks for part in rank.micro_batches(step)]
            assert all(part["labels"].shape == (2, 8) for part in parts)
            found = {
                int(number): row.tolist()
                for part in parts
                for number, row in zip(part["sample_index"], part["labels"], strict=True)
            }
            assert found == {sample: labels[sample] for sample in range(consumed, consumed + size)}
            consumed += size
        assert ranks[0].epochs(8) == {"tokens": consumed / 499}
        later = next(iter(ranks[0].iterate(5, 7)))
        assert all(equal(a, b) for a, b in zip(later, ranks[0].micro_batches(5), strict=True))


def test_rank_order_is_the_documented_one(make_pair: MakePair, make_config: MakeConfig) -> None:
    config = make_config(make_pair([200]), batch=12, micro=2)
    batches = TrainBatches(config, seed=0, rank=1, world_size=3)
    assert [batch["sample_index"].tolist() for batch in batches.micro_batches(5)] == [[62, 63], [68, 69]]


def test_a_mixture_reads_each_corpus_as_often_as_it_says(make_pair: MakePair, make_config: MakeConfig) -> None:
    corpora = [make_pair([81], "a"), make_pair([161], "b")]
    batches = TrainBatches(make_config(*corpora, weights=[3, 1], batch=8), seed=0)
    located = [batches.order.locate(samples_of(batches.micro_batches(step))).source for step in range(10)]
    drawn = Counter(int(source) for part in located for source in part)
    assert drawn == {0: 60, 1: 20}
    assert batches.epochs(10) == {"a": 60 / 10, "b": 20 / 20}


def test_iterate_resumes_where_it_is_told(make_pair: MakePair, make_config: MakeConfig) -> None:
    config = make_config(make_pair([400]))
    whole = list(TrainBatches(config, seed=1).iterate(0, 6))
    resumed = list(TrainBatches(config, seed=1).iterate(4, 6))
    assert len(whole) == 6
    for left, right in zip(whole[4:], resumed, strict=True):
        assert all(equal(a, b) for a, b in zip(left, right, strict=True))
    assert not equal(whole[0][0], TrainBatches(config, seed=2).micro_batches(0)[0])


def prefetch_threads() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetch_reads_ahead_but_not_far(threads: int) -> None:
    begun: list[int] = []
    last = threads + 2
    ahead = threading.Event()

    def produce(number: int) -> int:
        begun.append(number)
        if len(begun) == last + 1:
            ahead.set()
        return number

    with closing(prefetch((partial(produce, number) for number in range(100)), threads, depth=2)) as items:
        assert next(items) == 0
        assert ahead.wait(60)  # one taken, two ready, and one for each thread
        assert sorted(begun) == list(range(last + 1))
    assert prefetch_threads() == 0
    assert len(begun) < 10


def test_several_threads_work_at_once_and_the_order_stays() -> None:
    """Each task waits for the other, so one thread alone would never end; the second is ready first."""
    both = threading.Barrier(2, timeout=60)
    second = threading.Event()

    def first_task() -> int:
        both.wait()
        assert second.wait(60)
        return 0

    def second_task() -> int:
        both.wait()
        second.set()
        return 1

    assert list(prefetch([first_task, second_task], threads=2)) == [0, 1]


def test_prefetch_raises_in_its_place() -> None:
    def fail() -> int:
        raise ValueError("shard 7 is unreadable")

    items = prefetch([lambda: 1, fail, lambda: 3])
    assert next(items) == 1
    with pytest.raises(ValueError, match="shard 7"):
        next(items)
    assert prefetch_threads() == 0


@pytest.mark.parametrize(("batch", "world", "sizes"), [(32, 3, "30 or 33"), (2, 4, "4"), (16, 32, "32")])
def test_a_batch_that_does_not_divide_is_refused(
    make_pair: MakePair, make_config: MakeConfig, batch: int, world: int, sizes: str
) -> None:
    config = make_config(make_pair([400]), batch=batch, micro=8)
    with pytest.raises(
        ValueError, match=rf"{batch} is not a multiple of the world size {world}; set it to {sizes}, or"
    ):
        TrainBatches(config, 0, 0, world)


@pytest.mark.parametrize(
    ("batch", "micro", "world", "expected"),
    [(32, 8, 2, (8, 2)), (16, 8, 4, (4, 1)), (32, 3, 2, (2, 8)), (4, 8, 1, (4, 1))],
)
def test_micro_batches_are_as_large_as_fits(
    make_pair: MakePair, make_config: MakeConfig, batch: int, micro: int, world: int, expected: tuple[int, int]
) -> None:
    """Up to micro_batch_size; the step holds the same samples."""
    config = make_config(make_pair([400]), batch=batch, micro=micro)
    ranks = [TrainBatches(config, 0, rank, world) for rank in range(world)]
    assert {(each.micro_batch, each.accumulation_steps) for each in ranks} == {expected}
    found = [batch["sample_index"].tolist() for each in ranks for batch in each.micro_batches(1)]
    assert {len(samples) for samples in found} == {expected[0]}
    assert sorted(sample for samples in found for sample in samples) == list(range(batch, 2 * batch))


def test_a_corpus_shorter_than_a_sample_is_refused(make_pair: MakePair, make_config: MakeConfig) -> None:
    TrainBatches(make_config(make_pair([9], "enough")), 0)
    with pytest.raises(ValueError, match=r"short\.bin: 8 tokens are fewer than one sample of data\.sequence_length 8"):
        TrainBatches(make_config(make_pair([8], "short")), 0)


def test_two_corpora_of_one_name_are_refused(make_pair: MakePair) -> None:
    path = str(make_pair([100]).path)
    config = DataConfig.model_validate(
        {"train": [{"path": path}] * 2, "sequence_length": 8, "global_batch_size": 1, "micro_batch_size": 1}
    )
    with pytest.raises(ValueError, match="two corpora are named 'tokens'"):
        open_corpora(config.train)


def test_corpora_of_different_tokenizers_are_refused(
    byte_corpus: Path, text_folder: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    (tmp_path / "more.txt").write_text("more text\n" * 100)
    more = Sources((str(tmp_path / "more.txt"),))
    for name, tokenizer in (("same", str(byte_corpus / "tokenizer")), ("other", "train-bpe:300")):
        prepare(Request(more, tokenizer, tmp_path / name))
    first = open_corpus(byte_corpus)
    TrainBatches(make_config(first, open_corpus(tmp_path / "same")), 0)
    with pytest.raises(ValueError, match="made with different tokenizers; prepare other again with --tokenizer"):
        TrainBatches(make_config(first, open_corpus(tmp_path / "other")), 0)


def evaluate(corpus: Corpus, length: int, micro: int, max_batches: int | None, world: int) -> Counter[int]:
    """Count how often each token of the stream is a target, over all ranks; check that ranks march in step."""
    targets: Counter[int] = Counter()
    ranks = [ValidationBatches(corpus.held_out, length, micro, max_batches, rank, world) for rank in range(world)]
    batches = [list(rank) for rank in ranks]
    for rank, mine in zip(ranks, batches, strict=True):
        assert len(mine) == len(rank) == len(batches[0])
        assert all(equal(a, b) for a, b in zip(mine, rank, strict=True))
        for batch in mine:
            assert batch["input_ids"].shape == (micro, length)
            assert torch.all((batch["labels"] == -100) | (batch["labels"] == batch["input_ids"] + 1))
            assert torch.all((batch["sample_index"] >= 0) | torch.all(batch["labels"] == -100, dim=1))
            targets.update(batch["labels"][batch["labels"] >= 0].tolist())
    return targets


@settings(max_examples=40)
@given(
    tokens=st.integers(2, 120),
    length=st.integers(1, 20),
    micro=st.integers(1, 4),
    world=st.integers(1, 4),
    max_batches=st.none() | st.integers(1, 5),
)
def test_validation_is_the_same_for_every_world_size(
    make_pair: MakePair, tokens: int, length: int, micro: int, world: int, max_batches: int | None
) -> None:
    corpus = make_pair([tokens])
    targets = evaluate(corpus, length, micro, max_batches, world)
    assert targets == evaluate(corpus, length, micro, max_batches, 1)
    assert set(targets.values()) == {1}
    whole = max_batches is None or max_batches * micro * length >= tokens - 1
    assert whole == (len(targets) == tokens - 1), "every token of a whole split but the first is a target"


def test_validation_windows_spread_over_the_split(make_pair: MakePair) -> None:
    batches = ValidationBatches(make_pair([801]).held_out, 8, micro_batch_size=2, max_batches=2)
    assert samples_of(list(batches)) == [0, 25, 50, 75]


def test_validation_needs_something_to_predict(make_pair: MakePair) -> None:
    with pytest.raises(ValueError, match=r"tokens\.bin: 1 tokens leave nothing to predict"):
        ValidationBatches(make_pair([1]).held_out, 8, 2)


def test_validation_defaults_to_what_training_holds_out(
    byte_corpus: Path, make_pair: MakePair, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, bare = open_corpus(byte_corpus), make_pair([100])
    config = make_config(prepared, bare)
    assert [split.name for split in opened_splits(config).values()] == ["validation"]
    explicit = config.model_copy(update={"validation": config.train})
    assert {name: split.name for name, split in opened_splits(explicit).items()} == {
        "bytes": "validation",
        "tokens": "train",
    }
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["data.validation: tokens"]
    assert "is trained on" in caplog.text


def test_ids_beyond_the_vocabulary_name_their_corpus(make_pair: MakePair, make_config: MakeConfig) -> None:
    """Ids of the pairs are 0, 1, 2, ...: 33 windows of 8 end at id 264."""
    small, large = make_pair([9], "small"), make_pair([8 * 33 + 1], "large")
    config = make_config(small, large, batch=64)
    whole = TrainBatches(config, seed=0, vocab_size=265).micro_batches(0)
    assert max(int(batch["labels"].max()) for batch in whole) == 264
    with pytest.raises(DamagedFileError, match=r"large: holds token id 26\d, .* ends at 263"):
        TrainBatches(config, seed=0, vocab_size=264).micro_batches(0)
    held_out = large.held_out
    assert len(list(ValidationBatches(held_out, 8, 4, vocab_size=265))) == 9
    with pytest.raises(DamagedFileError, match=r"large\.bin: holds token id 100, .* ends at 99"):
        list(ValidationBatches(held_out, 8, 4, vocab_size=100))


def test_an_id_below_zero_that_is_only_a_label_names_its_corpus(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "ids", np.dtype("<i4")) as writer:
        writer.add_documents(np.array([1, 2, 3, 4, -1]), [5])
    with pytest.raises(DamagedFileError, match=r"ids\.bin: holds token id -1, "):
        list(ValidationBatches(open_corpus(tmp_path / "ids").held_out, 4, 1, vocab_size=10))
