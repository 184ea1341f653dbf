"""Join the tokens of many `.bin`/`.idx` pairs, end to end, into one stream."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from plumbline.data.indexed import Int64s, Integers
from plumbline.data.remote.piece import Piece
from plumbline.data.remote.tokens import RemoteTokens

OPEN = 4096
"""Shards of all corpora together that are open at a time: each takes a few of the 65,530 mappings of a process."""


class Tokens(Protocol):
    """Read a stream of tokens, and where its documents begin; `str` of it names it in messages."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""

    def read(self, start: int, stop: int) -> Integers:
        """Return tokens `start` to `stop`, without those beyond the end."""

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""

    def read_all(self, starts: Int64s, sizes: Int64s) -> Integers:
        """Return n stretches of tokens, end to end: `sizes` tokens from `starts` on, all of which there must be."""

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return `document_starts` of n stretches, end to end, and before them the stretch that each lies in."""


class Shards:
    """Read several pairs as one, each opened when it is first read.

    Args:
        name: for messages.
        lengths: tokens of each.
        num_documents: of all of them.
        open_shard: opens the pair of a number.
    """

    def __init__(
        self, name: str, lengths: Sequence[int], num_documents: int, open_shard: Callable[[int], Tokens]
    ) -> None:
        self.num_documents = num_documents
        self._name = name
        self._starts = [0, *accumulate(lengths)]
        self._open_shard = open_shard

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._starts[-1]

    def __str__(self) -> str:
        return self._name

    def read(self, start: int, stop: int) -> Integers:
        """Return tokens `start` to `stop`, without those beyond the end; they may lie in several shards."""
        return self.read_all(np.array([start]), np.array([max(0, min(stop, len(self)) - start)]))

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""
        return self.documents_within(np.array([start]), np.array([stop]))[1]

    def read_all(self, starts: Int64s, sizes: Int64s) -> Integers:
        """Return n stretches of tokens, end to end: `sizes` tokens from `starts` on, all of which there must be."""
        spans = [span for each in self._spans_of_all(starts, starts + sizes) for span in each]
        parts: list[Integers] = [np.empty(0, np.uint16)] * len(spans)
        for number, places, first, last in _by_shard(spans):
            tokens = _opened(self, number).read_all(first, last - first)
            for place, part in zip(places.tolist(), np.split(tokens, np.cumsum(last - first)[:-1]), strict=True):
                parts[place] = part
        return np.concatenate(parts) if parts else np.empty(0, np.uint16)

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return `document_starts` of n stretches, end to end, and before them the stretch that each lies in."""
        spans_of_all = self._spans_of_all(first, last)
        stretch = np.repeat(np.arange(len(first)), [len(spans) for spans in spans_of_all])
        which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, places, after, before in _by_shard([span for spans in spans_of_all for span in spans]):
            # A shard begins with a document, which counts unless it is where we start
            entered = after + self._starts[number] > first[stretch[places]]
            its, begins = _opened(self, number).documents_within(after - entered, before)
            which.append(stretch[places[its]])
            found.append(begins + self._starts[number])
        order = np.argsort(np.concatenate(which), kind="stable")  # shards came in their order, as did what is in one
        return np.concatenate(which)[order], np.concatenate(found)[order]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return what has to be fetched to read tokens `start` to `stop`, in order."""
        return [
            piece
            for number, first, last in self._spans(start, stop)
            for piece in pieces_of(_opened(self, number), first, last)
        ]

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (shard, first, last) of each shard that holds some of tokens `start` to `stop`."""
        stop = min(stop, len(self))
        if stop <= start:
            return []
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        return [
            (number, max(start, self._starts[number]) - self._starts[number], min(stop, end) - self._starts[number])
            for number in range(first, last)
            if (end := self._starts[number + 1]) > self._starts[number]
        ]

    def _spans_of_all(self, starts: Int64s, stops: Int64s) -> list[list[tuple[int, int, int]]]:
        return [self._spans(*bounds) for bounds in zip(starts.tolist(), stops.tolist(), strict=True)]

    def open(self, number: int) -> Tokens:
        """Open one shard.

        Raises:
            ValueError: it is not what the manifest says.
        """
        shard, expected = self._open_shard(number), self._starts[number + 1] - self._starts[number]
        if len(shard) != expected:
            raise ValueError(
                f"{shard}: {len(shard)} tokens where the corpus's manifest makes {expected} of its size; prepare the "
                "corpus again with --overwrite"
            )
        return shard


def _by_shard(spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, Int64s, Int64s, Int64s]]:
    """Yield each shard that some spans lie in: its number, the places of its spans in the list, and their bounds."""
    numbers, first, last = np.array(spans, np.int64).reshape(-1, 3).T
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        yield number, places, first[places], last[places]


@lru_cache(maxsize=OPEN)
def _opened(shards: Shards, number: int) -> Tokens:
    """Return an open shard of any corpus."""
    return shards.open(number)


def pieces_of(tokens: Tokens, start: int, stop: int) -> list[Piece]:
    """Return what has to be fetched to read tokens `start` to `stop` of any stream: nothing of a local one."""
    return tokens.pieces(start, stop) if isinstance(tokens, Shards | RemoteTokens) else []
