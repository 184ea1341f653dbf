"""Write batches where earlier ones lay, once nobody holds those any more.

The system takes large arrays back when they are freed, and clears every page of the next: that takes about as long as
filling them.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class Memory:
    """Lend memory, and again once the last array or tensor over it is gone."""

    def __init__(self, kept: int) -> None:
        """Keep at most `kept` blocks that nobody holds."""
        self._free: deque[memoryview] = deque(maxlen=kept)

    def lend(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` bytes, of any value, that no array or tensor holds."""
        try:
            block = self._free.pop()
        except IndexError:
            block = memoryview(b"")
        if len(block) < size:
            block = np.empty(size, np.uint8).data
        # Arrays made of it hold `lent` itself: numpy would pass it over for an array below, not for a memoryview
        lent = np.frombuffer(block, np.uint8, size)
        weakref.finalize(lent, self._free.append, block)
        return lent
