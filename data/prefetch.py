"""Compute items ahead of their consumer, in threads, in order and up to a bound."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")

DEPTH = 2
"""Finished items that may wait, besides the one that each thread works on."""


def prefetch(tasks: Iterable[Callable[[], Item]], threads: int = 1, depth: int = DEPTH) -> Generator[Item, None, None]:
    """Yield the results of `tasks` in order, while `threads` background threads work up to `depth` of them ahead.

    An exception in a task is raised here, in its place in the order. Closing the generator ends the threads.
    """
    pending: deque[Future[Item]] = deque()
    waiting: Iterator[Callable[[], Item]] = iter(tasks)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        pending.extend(pool.submit(task) for task in islice(waiting, threads + depth))
        while pending:
            item = pending.popleft().result()
            pending.extend(pool.submit(task) for task in islice(waiting, 1))
            yield item
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
