"""Counts of a corpus: lengths by powers of two and tokens, of all of it or of blocks from everywhere."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from plumbline.data import counting
from plumbline.data.corpus import Corpus
from plumbline.data.counting import count

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
    assert counts.by_token.tolist() == [1] * sum(lengths)


def test_a_large_split_is_counted_in_blocks_from_everywhere(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "BLOCK", 100)
    monkeypatch.setattr(counting, "BLOCKS", 4)
    lengths = [30] * 100
    counts = count(make_pair(lengths).splits["train"])  # 30 blocks, of which 0, 7, 15 and 22
    assert counts.tokens == 400
    (ids,) = np.nonzero(counts.by_token)
    assert sorted({int(token) // 100 for token in ids}) == [0, 7, 15, 22]
    begun = sum(1 for first in range(0, 3000, 30) if first // 100 in (0, 7, 15, 22))
    assert counts.lengths == [(16, 31, begun)], "a document is as long as it is, beyond the block that it begins in"


def test_frequent_tokens_come_first() -> None:
    counts = counting.Counts(10, np.array([3, 0, 5, 2]), np.array([0]))
    assert counts.frequent(2) == [(2, 5), (0, 3)]
    assert counts.frequent(9) == [(2, 5), (0, 3), (3, 2)]
    assert counts.lengths == []
