"""Run calls in several processes, or in this one, without leaving processes behind."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")


class Call(NamedTuple):
    """Hold a function and its arguments."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]


class Workers:
    """Manage the processes. A context manager: on an error, or if this process is killed, they end at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        self._life: Connection | None = None
        if count > 1:
            # Fresh processes: a fork would copy the tokenizer library's threads in an unknown state.
            context = get_context("spawn")
            death, self._life = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(count, context, _start_worker, (death,))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool and self._life:
            if kind is not None:
                self._life.close()
            self._pool.shutdown(cancel_futures=True)
            self._life.close()

    def in_order(self, calls: Iterable[tuple[Item, Call | None]]) -> Iterator[Item]:
        """Make the calls, some ahead of time, and yield each item in order once its call (if any) is done.

        Raises:
            OSError: a process died.
        """
        pending: deque[tuple[Item, Future[None] | None]] = deque()
        running = 0
        for item, call in calls:
            pending.append((item, self._submit(call) if call else None))
            running += call is not None
            while pending and (running > 2 * self.count or pending[0][1] is None):
                running -= pending[0][1] is not None
                yield _finished(*pending.popleft())
        while pending:
            yield _finished(*pending.popleft())

    def _submit(self, call: Call) -> "Future[None]":
        if self._pool:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes started by it inherit the mask
            try:
                return self._pool.submit(call.function, *call.arguments)
            except BrokenProcessPool as error:
                raise _killed() from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        call.function(*call.arguments)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _finished(item: Item, future: "Future[None] | None") -> Item:
    try:
        if future:
            future.result()
    except BrokenProcessPool as error:
        raise _killed() from error
    return item


def _killed() -> OSError:
    return OSError(
        "a process was killed, most likely for lack of memory; use fewer --workers: the same command goes on from here"
    )


def _start_worker(life: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism comes from the processes
    threading.Thread(target=_end_with_the_parent, args=(life,), daemon=True).start()


def _end_with_the_parent(life: Connection) -> None:
    """End this process once the parent closes the other end of the pipe or dies."""
    life.poll(None)
    os._exit(1)
