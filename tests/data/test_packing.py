"""Packing by best fit: no token is lost, no document is cut that fits, and any window is found at once."""

import errno
import fcntl
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.data.config import DataConfig
from plumbline.data.corpus import Corpus, Split, open_corpus
from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.loader import TrainBatches
from plumbline.data.packed import PackedSplit, cache_folder, open_packed
from plumbline.data.packing import best_fit_decreasing, pack, packed_blocks
from plumbline.data.streams import WindowStream
from plumbline.data.windows import gather
from tests.conftest import REPOSITORY
from tests.data.made import opened_splits, shard
from tests.data.servers import serve

MakePair = Callable[..., Corpus]
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUMBLINE_CACHE", str(tmp_path / "cache"))


def one_by_one(sizes: Sequence[int], capacity: int) -> list[int]:
    """Pack as the paper writes it; return what is in each bin."""
    bins: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, used in enumerate(bins) if used + size <= capacity]
        if fitting:
            bins[max(fitting, key=lambda number: bins[number])] += size
        else:
            bins.append(size)
    return sorted(bins)


@given(data=st.data(), capacity=st.integers(1, 30))
def test_bins_are_as_full_as_those_of_best_fit_one_by_one(data: st.DataObject, capacity: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit_decreasing(np.array(sizes, np.int64), capacity)
    filled = np.bincount(bins, sizes) if sizes else np.zeros(0)
    assert sorted(filled.tolist()) == one_by_one(sizes, capacity)


class Stream:
    """Hold documents without tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = np.cumsum([0, *lengths[:-1]])
        self.total = sum(lengths)

    def __len__(self) -> int:
        return self.total

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        return self.starts[(self.starts > start) & (self.starts < stop)]


@given(lengths=LENGTHS, length=st.integers(1, 12), block=st.integers(1, 60))
def test_every_token_is_an_input_once_and_only_long_documents_are_cut(
    lengths: list[int], length: int, block: int
) -> None:
    """Whatever the block: each token but the last is an input once, in a window with room, in whole documents."""
    stream = Stream(lengths)
    blocks = list(packed_blocks(stream, length, block))
    starts, sizes = (np.concatenate([getattr(each, name) for each in blocks]) for name in ("starts", "lengths"))
    assert sorted(np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)]).tolist()) == list(
        range(stream.total - 1)
    )
    for each in blocks:
        window = np.repeat(np.arange(len(each.counts)), each.counts)
        assert np.bincount(window, each.lengths).max(initial=0) <= length
    documents = {int(start): end for start, end in zip(stream.starts, [*stream.starts[1:], stream.total], strict=True)}
    pieces = dict(zip(starts.tolist(), sizes.tolist(), strict=True))
    for start, end in documents.items():
        inputs = min(end, stream.total - 1) - start
        while inputs > 0:  # whole windows, then the rest
            assert pieces.pop(start) == min(inputs, length)
            start, inputs = start + length, inputs - length
    assert not pieces
    assert sum(each.documents for each in blocks) == sum(
        min(end, stream.total - 1) > start
        for start, end in zip(stream.starts, [*stream.starts[1:], stream.total], strict=True)
    )


def packed(corpus: Corpus, length: int) -> PackedSplit:
    return open_packed(corpus.splits["train"], corpus.fingerprint, length)


def config_of(*corpora: Corpus, length: int, batch: int, micro: int | None = None) -> DataConfig:
    return DataConfig.model_validate(
        {
            "train": [{"path": str(corpus.path)} for corpus in corpora],
            "sequence_length": length,
            "global_batch_size": batch,
            "micro_batch_size": micro or batch,
            "packing": "best_fit",
        }
    )


@settings(max_examples=40)
@given(lengths=LENGTHS, length=st.integers(1, 12), seed=st.integers(0, 9))
def test_an_epoch_trains_on_every_pair_of_a_token_and_its_successor_once(
    make_pair: MakePair, lengths: list[int], length: int, seed: int
) -> None:
    """Token ids number the stream, so a label is its input plus one; a row's documents are those of the corpus."""
    corpus = make_pair(lengths)
    windows = packed(corpus, length).training_windows(length)
    (batch,) = TrainBatches(config_of(corpus, length=length, batch=windows), seed).micro_batches(3)
    inputs, labels = batch["input_ids"], batch["labels"]
    real = labels != -100
    assert (labels[real] == inputs[real] + 1).all()
    assert sorted(inputs[real].tolist()) == list(range(sum(lengths) - 1))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for row in range(windows):
        used = int(real[row].sum())
        assert bool(real[row, :used].all())  # padding comes last, as a document of its own
        keys = [int(document_of[token]) for token in inputs[row, :used]] + [-1] * (length - used)
        number, position = -1, 0
        for place, key in enumerate(keys):
            begins = place == 0 or key != keys[place - 1]
            if key == keys[place - 1] and place < used and inputs[row, place] != inputs[row, place - 1] + 1:
                begins = True  # another piece of the same document
            number, position = (number + 1, 0) if begins else (number, position + 1)
            assert int(batch["document_ids"][row, place]) == number
            assert int(batch["positions"][row, place]) == position


@settings(max_examples=30)
@given(micro=st.integers(1, 3), accumulation=st.integers(1, 3), world=st.integers(1, 4), step=st.integers(0, 10**9))
def test_packed_steps_hold_the_same_samples_for_every_world_size(
    make_pair: MakePair, micro: int, accumulation: int, world: int, step: int
) -> None:
    corpora = [make_pair([5, 30, 2, 2, 17], "a"), make_pair([40, 3, 3, 1], "b")]
    batch = micro * accumulation * world

    def rows(micro: int, world: int) -> dict[int, tuple[list[int], list[int]]]:
        config = config_of(*corpora, length=8, batch=batch, micro=micro)
        return {
            int(number): (labels.tolist(), documents.tolist())
            for rank in range(world)
            for part in TrainBatches(config, 1, rank, world).micro_batches(step)
            for number, labels, documents in zip(
                part["sample_index"], part["labels"], part["document_ids"], strict=True
            )
        }

    assert rows(micro, world) == rows(batch, 1)


def test_reading_one_window_is_what_a_batch_holds(make_pair: MakePair) -> None:
    corpus = make_pair([5, 30, 2, 2, 17])
    split = packed(corpus, 8)
    (batch,) = TrainBatches(config_of(corpus, length=8, batch=4), 0).micro_batches(0)
    located = TrainBatches(config_of(corpus, length=8, batch=4), 0).order.locate(np.arange(4))
    for row, number in enumerate(located.window.tolist()):
        window = split.read(number, 8)
        assert window.inputs.tolist() == batch["input_ids"][row].tolist()
        assert window.labels.tolist() == batch["labels"][row].tolist()
        assert window.begins.tolist() == (batch["positions"][row, 1:] == 0).nonzero().flatten().add(1).tolist()


def test_a_label_may_lie_in_a_pair_of_wider_tokens(tmp_path: Path) -> None:
    for name, first, vocabulary in (("a", 0, 1000), ("b", 100_000, 1 << 20)):
        with IndexedWriter(tmp_path / name, token_dtype(vocabulary)) as writer:
            writer.add_documents(np.arange(first, first + 8), [8])
    split = packed(open_corpus([f"{tmp_path}/a", f"{tmp_path}/b"]), 8)
    labels = [split.read(number, 8).labels.tolist() for number in range(split.training_windows(8))]
    assert [*range(1, 8), 100_000] in labels


def test_shards_and_a_url_give_the_same_packed_batches(byte_corpus: Path, tmp_path: Path) -> None:
    """Of corpora with fingerprints of their own, so that each packs for itself; order depends on the fingerprint."""
    sharded = shard(byte_corpus, tmp_path / "sharded", [7, 30])
    one, many = (open_corpus(path).splits["train"] for path in (byte_corpus, sharded))
    whole, parts = (open_packed(split, name, 64) for split, name in ((one, "one"), (many, "many")))
    numbers = np.arange(whole.facts.windows)
    first, second = (
        gather([stream], 0 * numbers, numbers, numbers, 64) for stream in cast(list[WindowStream], [whole, parts])
    )
    for key, values in cast(dict[str, torch.Tensor], first).items():
        assert torch.equal(values, cast(dict[str, torch.Tensor], second)[key])
    with serve(tmp_path) as server:
        local = config_of(open_corpus(sharded), length=64, batch=8)
        source = {"path": f"{server.url}/sharded"}
        remote = DataConfig.model_validate(
            local.model_dump() | {"train": [source], "cache": {"path": str(tmp_path / "pieces")}, "reader_threads": 2}
        )
        pairs = zip(TrainBatches(local, 3).iterate(5, 25), TrainBatches(remote, 3).iterate(5, 25), strict=True)
        for (here,), (there,) in pairs:
            assert torch.equal(here["labels"], there["labels"])
            assert torch.equal(here["document_ids"], there["document_ids"])


def test_packing_says_what_it_pads_and_cuts(make_pair: MakePair) -> None:
    """Documents of 5, 3, 9 and 1 inputs in windows of 4: 4 + 4 + 4 whole, then 3 + 1 and 1 + 1, two places padded."""
    facts = packed(make_pair([5, 3, 9, 2]), 4).facts
    assert (facts.windows, facts.pieces, facts.documents, facts.cut) == (5, 7, 4, 2)
    assert facts.padding == pytest.approx(2 / 20)
    assert str(facts) == "5 windows, 10.00% padding, 2 of 4 documents are longer than a window and cut"
    config = config_of(make_pair([5, 3, 9, 2]), length=4, batch=5)
    assert f"packing  tokens: {facts}" in list(TrainBatches(config, 0).notes(1))


def test_windows_are_packed_once_and_again_when_files_are_damaged(make_pair: MakePair) -> None:
    corpus = make_pair([5, 30, 2, 2, 17])
    before = packed(corpus, 8)
    starts = before.starts.tolist()
    folder = cache_folder() / "packing" / f"{corpus.fingerprint}-8"
    made = (folder / "packing.json").stat().st_mtime_ns
    assert packed(corpus, 8).facts == before.facts
    assert (folder / "packing.json").stat().st_mtime_ns == made
    (folder / "starts").write_bytes((folder / "starts").read_bytes()[:-8])
    assert packed(corpus, 8).starts.tolist() == starts
    assert (folder / "packing.json").stat().st_mtime_ns > made


def test_processes_that_start_together_pack_once(make_pair: MakePair) -> None:
    corpus = make_pair([7] * 20_000)
    code = (
        "import sys, logging; logging.basicConfig(level=20); from plumbline.data.corpus import open_corpus;"
        "from plumbline.data.packed import open_packed; c = open_corpus(sys.argv[1]);"
        "print(open_packed(c.splits['train'], c.fingerprint, 16).facts.windows)"
    )
    start = partial(
        subprocess.Popen,
        [sys.executable, "-c", code, str(corpus.path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "launcher")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes = [start() for _ in range(2)]
    ended = [process.communicate() for process in processes]
    assert {out for out, _ in ended} == {"10000\n"}
    assert sum("packing 140,000 tokens" in err for _, err in ended) == 1


def test_a_cache_that_cannot_be_written_is_named(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUMBLINE_CACHE", "/proc/nowhere")
    with pytest.raises(ValueError, match="set PLUMBLINE_CACHE to a folder that can be written to"):
        packed(make_pair([5, 30]), 8)


def test_only_who_packs_takes_a_lock_and_must_find_one(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_pair([5, 30, 2])
    before = packed(corpus, 8)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert packed(corpus, 8).facts == before.facts
    remedy = "choose a folder on another file system, such as a disk of each node"
    with pytest.raises(ValueError, match=rf"^PLUMBLINE_CACHE = \S+: files there cannot be locked \(.*\); {remedy}$"):
        packed(corpus, 9)


def test_windows_without_room_are_refused_before_they_are_packed(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_pair([5, 30, 2, 2, 17])  # 55 inputs, at least 7 windows of as many pieces
    folder = cache_folder() / "packing" / f"{corpus.fingerprint}-8"
    usage = SimpleNamespace(free=7 * (12 + 8) - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"need about 0\.0 MB and the device has 0\.0 MB free; .*set PLUMBLINE_CACHE"):
        packed(corpus, 8)
    assert not folder.exists()
    usage.free += 1
    packed(corpus, 8)
    assert sum((folder / name).stat().st_size for name in ("starts", "lengths", "windows")) >= usage.free


def test_a_disk_that_is_full_meanwhile_is_named(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_arguments: object) -> Iterator[None]:
        yield from ()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("plumbline.data.packed.packed_blocks", fill)
    remedy = "Free some space, or set PLUMBLINE_CACHE to a folder on another device"
    with pytest.raises(ValueError, match=rf"-8: no space left on the device; nothing was kept\. {remedy}$"):
        packed(make_pair([5, 30]), 8)


def test_held_out_text_is_read_end_to_end(byte_corpus: Path) -> None:
    splits = opened_splits(config_of(open_corpus(byte_corpus), length=16, batch=2))
    assert [type(split) for split in splits.values()] == [Split]


def test_a_document_is_cut_into_whole_windows_and_a_rest() -> None:
    block = pack(np.array([100]), np.array([10]), 4)
    assert Counter(zip(block.starts.tolist(), block.lengths.tolist(), strict=True)) == Counter(
        [(100, 4), (104, 4), (108, 2)]
    )
