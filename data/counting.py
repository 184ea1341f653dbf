"""Count what a split of a corpus holds: how long its documents are, and which tokens are frequent."""

from dataclasses import dataclass

import numpy as np

from plumbline.data.corpus import Split
from plumbline.data.finding import next_document, tokens_of
from plumbline.data.indexed import Int64s

BLOCK = 2**22
"""Tokens that are read at a time."""

BLOCKS = 64
"""Blocks that are counted at most, spread evenly over a larger split: 268 million tokens."""


@dataclass(frozen=True)
class Counts:
    """Hold what was counted in some tokens of a split, of documents of which the first token is among them."""

    tokens: int
    """Number of tokens that were counted: all, or `BLOCKS` blocks of them."""
    by_token: Int64s
    """[highest id + 1]: how often each occurs."""
    by_length: Int64s
    """[k + 1]: documents of no tokens, then of 2^(k-1) to 2^k - 1 tokens."""

    @property
    def lengths(self) -> list[tuple[int, int, int]]:
        """Return shortest, longest and number of the documents of each power of two, from the first that has any."""
        (there,) = np.nonzero(self.by_length)
        powers = range(int(there[0]), int(there[-1]) + 1) if there.size else ()
        return [(1 << power >> 1, (1 << power) - 1, int(self.by_length[power])) for power in powers]

    def frequent(self, most: int) -> list[tuple[int, int]]:
        """Return the ids that occur most often, at most so many, with how often."""
        ids = np.argsort(-self.by_token, kind="stable")[:most]
        return [(int(token), int(self.by_token[token])) for token in ids if self.by_token[token]]


def count(split: Split) -> Counts:
    """Count the tokens and documents of a split, block by block, so that memory does not grow with it."""
    blocks = -(-split.num_tokens // BLOCK)
    chosen = [number * blocks // min(BLOCKS, blocks) for number in range(min(BLOCKS, blocks))]
    by_token, by_length = np.zeros(0, np.int64), np.zeros(0, np.int64)
    counted = 0
    for number in chosen:
        first, stop = number * BLOCK, min((number + 1) * BLOCK, split.num_tokens)
        by_token = _sum(by_token, np.bincount(tokens_of(split, first, stop)))
        begins = split.indexed.document_starts(first - 1, stop)
        if begins.size:
            lengths = np.diff(begins, append=next_document(split, stop - 1))
            by_length = _sum(by_length, np.bincount(np.frexp(lengths)[1]))
        counted += stop - first
    return Counts(counted, by_token, by_length)


def _sum(some: Int64s, more: Int64s) -> Int64s:
    """Return the sums of two rows of counts, of which either may be the longer one."""
    total = np.zeros(max(len(some), len(more)), np.int64)
    total[: len(some)] += some
    total[: len(more)] += more
    return total
