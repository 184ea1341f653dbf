"""Find where documents begin, for many ranges of a token stream at once.

The offsets lie in a memory-mapped index file and are not aligned to 8 bytes, so numpy's own search would copy all of
them. Instead, every n-th offset is kept in memory, which narrows a search down to n offsets; there, all ranges are
searched together.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

KEPT = 2**14
"""Approximate number of offsets kept in memory, 8 bytes each."""


class Documents(Protocol):
    """Know where the documents of a stream of tokens begin."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""


class Boundaries:
    """Search the ascending offsets at which documents begin."""

    def __init__(self, offsets: Int64s) -> None:
        self._offsets = offsets
        self._stride = max(1, len(offsets) // KEPT)
        self._kept = np.ascontiguousarray(offsets[:: self._stride])

    def within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return the offsets that lie strictly between `first` and `last` of each of n ranges, concatenated.

        Args:
            first: [n].
            last: [n], greater than `first`.

        Returns:
            The number of each offset's range (ascending), and the offsets.
        """
        below = self._below(np.concatenate([first + 1, last]))
        begin, counts = below[: len(first)], below[len(first) :] - below[: len(first)]
        stretch = np.repeat(np.arange(len(counts)), counts)
        found = np.arange(len(stretch)) + (begin - np.cumsum(counts) + counts)[stretch]
        return stretch, self._offsets[found]

    def _below(self, bounds: Int64s) -> Int64s:
        """Return how many offsets are smaller than each bound."""
        if self._stride == 1:
            return np.searchsorted(self._kept, bounds)
        block = np.searchsorted(self._kept, bounds) - 1  # the last kept offset that is smaller; -1: none is
        low = np.where(block < 0, 0, block * self._stride + 1)  # everything before `low` is smaller ...
        high = np.minimum((block + 1) * self._stride, len(self._offsets))  # ... and nothing from `high` on
        while (open_ := low < high).any():
            middle = np.where(open_, (low + high) // 2, 0)
            smaller = self._offsets[middle] < bounds
            low = np.where(open_ & smaller, middle + 1, low)
            high = np.where(open_ & ~smaller, middle, high)
        return low
