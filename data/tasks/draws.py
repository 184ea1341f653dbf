"""Draw random numbers by arithmetic alone, so that examples are the same for every machine and numpy version."""

import numpy as np

from plumbline.data.indexed import Int64s
from plumbline.data.order import UInt64s, subkey


class Draws:
    """Draw from the random stream that a key selects; each call continues where the last one ended."""

    def __init__(self, key: int) -> None:
        """Start the stream of a 64-bit key, see `order.derive_key`."""
        self._key = np.uint64(key)
        self._used = 0

    def integers(self, count: int, bound: int) -> Int64s:
        """Draw integers [count] in [0, bound), uniformly up to a bias of bound / 2^64."""
        numbers: Int64s = (self._words(count) % np.uint64(bound)).astype(np.int64)
        return numbers

    def numbers(self, count: int) -> list[int]:
        """Draw `count` integers below 2^62, for loops that reduce each modulo their number of choices."""
        numbers: list[int] = self.integers(count, 2**62).tolist()
        return numbers

    def distinct(self, count: int, bound: int) -> Int64s:
        """Draw distinct integers [count] in [0, bound), in random order."""
        order: Int64s = np.argsort(self._words(bound), kind="stable")
        return order[:count]

    def _words(self, count: int) -> UInt64s:
        first, self._used = self._used, self._used + count
        return subkey(self._key, np.arange(first, self._used))
