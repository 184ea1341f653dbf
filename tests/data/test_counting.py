"""Counts of a corpus: lengths by powers of two and tokens, of all of it or of blocks from everywhere."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plumbline.data import counting
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.counting import count
from plumbline.data.damage import DamagedFileError
from plumbline.data.indexed import IndexedWriter

MakePair = Callable[..., Corpus]


def powers(lengths: list[int]) -> dict[tuple[int, int], int]:
    return dict(Counter((1 << length.bit_length() >> 1, (1 << length.bit_length()) - 1) for length in lengths))


@pytest.mark.parametrize("block", [1 << 22, 1000, 7])
def test_all_of_a_small_split_is_counted(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """However blocks are cut."""
    monkeypatch.setattr(counting, "BLOCK", block)
    monkeypatch.setattr(counting, "BLOCKS", 10**6)
    lengths = [1, 2, 3, 4, 7, 8, 900, 1, 2500, 15, 16, 5]
    split = make_pair(lengths).splits["train"]
    counts = count(split)
    assert counts.tokens == sum(lengths)
    assert {(first, last): number for first, last, number in counts.lengths if number} == powers(lengths)
    assert [first for first, _, _ in counts.lengths] == [1 << power for power in range(12)], "none is left out between"
    assert counts.ids.tolist() == list(range(sum(lengths)))
    assert counts.by_id.tolist() == [1] * sum(lengths)


def test_a_large_split_is_counted_in_blocks_from_everywhere(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "BLOCK", 100)
    monkeypatch.setattr(counting, "BLOCKS", 4)
    lengths = [30] * 100
    counts = count(make_pair(lengths).splits["train"])  # 30 blocks, of which 0, 7, 15 and 22
    assert counts.tokens == 400
    assert sorted({token // 100 for token in counts.ids.tolist()}) == [0, 7, 15, 22]
    begun = sum(1 for first in range(0, 3000, 30) if first // 100 in (0, 7, 15, 22))
    assert counts.lengths == [(16, 31, begun)], "a document is as long as it is, beyond the block that it begins in"


def test_frequent_tokens_come_first() -> None:
    counts = counting.Counts(10, np.array([0, 2, 3]), np.array([3, 5, 2]), np.array([0]))
    assert counts.frequent(2) == [(2, 5), (0, 3)]
    assert counts.frequent(9) == [(2, 5), (0, 3), (3, 2)]
    assert counts.lengths == []


def write_pair(folder: Path, ids: list[int]) -> Corpus:
    with IndexedWriter(folder / "ids", np.dtype("<i4")) as writer:
        writer.add_documents(np.array(ids), [len(ids)])
    return open_corpus(folder / "ids")


@pytest.mark.parametrize("block", [1 << 22, 3])
def test_a_high_id_takes_no_array_of_all_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(counting, "BLOCK", block)
    split = write_pair(tmp_path, [5, 2, 300_000_000, 2, 2, 7, 5]).splits["train"]
    tracemalloc.start()
    counts = count(split)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
    assert counts.frequent(9) == [(2, 3), (5, 2), (7, 1), (300_000_000, 1)]


def test_an_id_below_zero_names_its_file(tmp_path: Path) -> None:
    split = write_pair(tmp_path, [5, 2, -7, 2]).splits["train"]
    with pytest.raises(DamagedFileError, match=r"ids\.bin: token 2 has the id -7, .*: the file is damaged; copy"):
        count(split)
