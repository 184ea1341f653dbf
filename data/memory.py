"""Reuse the memory of earlier batches once nobody holds them any more.

The system takes large arrays back when they are freed and clears every page of the next one, which takes about as long
as filling it.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class Memory:
    """Lend blocks of memory, each again once the last array or tensor over it is gone."""

    def __init__(self, kept: int) -> None:
        """Keep at most `kept` unused blocks."""
        self._free: deque[memoryview] = deque(maxlen=kept)

    def lend(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` uninitialised bytes that no array or tensor holds."""
        try:
            block = self._free.pop()
        except IndexError:
            block = memoryview(b"")
        if len(block) < size:
            block = np.empty(size, np.uint8).data
        # Arrays derived from `lent` keep it alive: numpy's `base` skips to an array underneath, but not to a memoryview
        lent = np.frombuffer(block, np.uint8, size)
        weakref.finalize(lent, self._free.append, block)
        return lent
