"""Count what a split of a corpus holds: how long its documents are, and which tokens are frequent."""

from dataclasses import dataclass

import numpy as np

from plumbline.data.corpus import Split
from plumbline.data.damage import DamagedFileError
from plumbline.data.finding import next_document
from plumbline.data.indexed import Int64s, Integers

BLOCK = 2**22
"""Tokens read at a time."""

BLOCKS = 64
"""Most blocks that are counted, spread evenly over a larger split: 268 million tokens."""


@dataclass(frozen=True)
class Counts:
    """Hold counts over some tokens of a split, and over the documents that begin among them."""

    tokens: int
    """Number of tokens counted: all, or `BLOCKS` blocks of them."""
    ids: Int64s
    """[n]: the token ids that occur, ascending."""
    by_id: Int64s
    """[n]: how often each occurs."""
    by_length: Int64s
    """[k + 1]: number of documents of no tokens, then of 2^(k-1) to 2^k - 1 tokens."""

    @property
    def lengths(self) -> list[tuple[int, int, int]]:
        """Return (shortest, longest, documents) for each power of two, from the first that has any."""
        (there,) = np.nonzero(self.by_length)
        powers = range(int(there[0]), int(there[-1]) + 1) if there.size else ()
        return [(1 << power >> 1, (1 << power) - 1, int(self.by_length[power])) for power in powers]

    def frequent(self, most: int) -> list[tuple[int, int]]:
        """Return up to `most` of the most frequent ids, each with its count."""
        first = np.argsort(-self.by_id, kind="stable")[:most]
        return [*zip(self.ids[first].tolist(), self.by_id[first].tolist(), strict=True)]


def count(split: Split) -> Counts:
    """Count the tokens and documents of a split, block by block, so that memory does not grow with it.

    Raises:
        DamagedFileError: an id is below 0.
    """
    blocks = -(-split.num_tokens // BLOCK)
    chosen = [number * blocks // min(BLOCKS, blocks) for number in range(min(BLOCKS, blocks))]
    ids, by_id, by_length = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    counted = 0
    for number in chosen:
        first, stop = number * BLOCK, min((number + 1) * BLOCK, split.num_tokens)
        tokens = split.indexed.read(first, stop)
        if tokens.min() < 0:
            raise DamagedFileError(
                f"{split}: token {first + int(tokens.argmin()):,} has the id {tokens.min()}, and none is below 0: "
                "the file is damaged; copy or prepare it again"
            )
        found, times = _occurring(tokens)
        ids, places = np.unique(np.concatenate([ids, found]), return_inverse=True)
        by_id = np.bincount(places, np.concatenate([by_id, times])).astype(np.int64)
        begins = split.indexed.document_starts(first - 1, stop)
        if begins.size:
            lengths = np.diff(begins, append=next_document(split, stop - 1))
            by_length = _sum(by_length, np.bincount(np.frexp(lengths)[1]))
        counted += stop - first
    return Counts(counted, ids, by_id, by_length)


def _occurring(tokens: Integers) -> tuple[Int64s, Int64s]:
    """Return the ids among some tokens, and how often each occurs."""
    if tokens.max() >= BLOCK:  # too high for an array of all ids
        ids, times = np.unique(tokens, return_counts=True)
        return ids.astype(np.int64), times
    by_token = np.bincount(tokens)
    ids = np.flatnonzero(by_token)
    return ids, by_token[ids]


def _sum(some: Int64s, more: Int64s) -> Int64s:
    """Add two rows of counts; either may be the longer one."""
    total = np.zeros(max(len(some), len(more)), np.int64)
    total[: len(some)] += some
    total[: len(more)] += more
    return total
