"""Fetch the pieces that the next steps read, in order: it is known since the order of samples is.

The pieces of the next steps are kept as a plan (plans.py), which tells every process that shares the cache what may be
evicted. Threads fetch the planned pieces. A piece that they cannot get is left to the step that reads it, which tries
again and reports the error.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from plumbline.data.indexed import BLOCK_BYTES
from plumbline.data.remote.cache import Cache
from plumbline.data.remote.fetch import wait_before
from plumbline.data.remote.piece import Piece

LOG = logging.getLogger(__name__)

THREADS = 8
"""Simultaneous downloads of one process."""
HORIZON = 1024
"""Pieces to look ahead, or those of the next two steps if there are more."""
STEPS = 64
"""Most steps to look ahead, which matters if a mixture reads nothing remote for a while."""
MEMORY = 2 * (THREADS + 1) * BLOCK_BYTES
"""Most bytes that one process's downloads hold, including that of a waiting step: the parts, and the joined bytes."""


class Ahead:
    """Fetch in the background the pieces that a range of steps reads.

    Args:
        cache: where pieces are stored.
        pieces_at: the pieces that this process reads in one step, in order.
        stop: the step at which reading ends.
    """

    def __init__(self, cache: Cache, pieces_at: Callable[[int], Sequence[Piece]], stop: int) -> None:
        self._cache, self._pieces_at, self._stop = cache, pieces_at, stop
        self._plan = cache.plan()
        self._steps: deque[tuple[int, Sequence[Piece]]] = deque()
        self._queue: deque[tuple[Piece, int]] = deque()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"fetch-{number}", daemon=True) for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def reach(self, step: int) -> None:
        """Move the horizon: `step` is read next."""
        while self._steps and self._steps[0][0] < step:
            self._steps.popleft()
        following = self._steps[-1][0] + 1 if self._steps else step
        count = sum(len(pieces) for _, pieces in self._steps)
        while following < self._stop and len(self._steps) < STEPS and (len(self._steps) < 2 or count < HORIZON):
            pieces = self._pieces_at(following)
            self._steps.append((following, pieces))
            following, count = following + 1, count + len(pieces)
        planned: dict[Piece, int] = {}
        for number, pieces in self._steps:
            for piece in pieces:
                planned.setdefault(piece, number - step)
        with self._cache.usable():
            self._plan.write({piece.key: steps for piece, steps in planned.items()})
        with self._changed:
            self._queue = deque(planned.items())
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads; one that waits for a server ends after its time-out."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1)
        self._plan.close()

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed.is_set())
                if self._closed.is_set():
                    return
                piece, steps = self._queue.popleft()
            try:
                fits = self._cache.fetch(piece, steps)
            except OSError as error:
                failures += 1
                LOG.debug(f"ahead of its step: {error}")
                self._closed.wait(wait_before(failures))
                continue
            failures = 0
            if not fits:  # neither will pieces needed later, until the next step
                with self._changed:
                    self._queue.clear()
