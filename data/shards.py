"""Join the tokens of many `.bin`/`.idx` pairs, end to end, into one stream."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)
        self._open_shard = open_shard

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._starts[-1])

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
        spans = self._spans(starts, starts + sizes)
        parts: list[Integers] = [np.empty(0, np.uint16)] * len(spans.shard)
        for number, places in spans.by_shard():
            first, last = spans.first[places], spans.last[places]
            tokens = _opened(self, number).read_all(first, last - first)
            ends = np.cumsum(last - first).tolist()
            for place, begin, end in zip(places.tolist(), [0, *ends], ends, strict=False):
                parts[place] = tokens[begin:end]
        return np.concatenate(parts) if parts else np.empty(0, np.uint16)

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return `document_starts` of n stretches, end to end, and before them the stretch that each lies in."""
        spans = self._spans(first, last)
        which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, places in spans.by_shard():
            stretch, after, before = spans.stretch[places], spans.first[places], self._starts[number]
            # A shard begins with a document, which counts unless it is where we start
            entered = after + before > first[stretch]
            its, begins = _opened(self, number).documents_within(after - entered, spans.last[places])
            which.append(stretch[its])
            found.append(begins + before)
        order = np.argsort(np.concatenate(which), kind="stable")  # shards came in their order, as did what is in one
        return np.concatenate(which)[order], np.concatenate(found)[order]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return what has to be fetched to read tokens `start` to `stop`, in order."""
        spans = self._spans(np.array([start]), np.array([stop]))
        bounds = zip(spans.shard.tolist(), spans.first.tolist(), spans.last.tolist(), strict=True)
        return [piece for number, first, last in bounds for piece in pieces_of(_opened(self, number), first, last)]

    def _spans(self, starts: Int64s, stops: Int64s) -> "_Spans":
        """Cut n stretches of tokens where shards end; what lies beyond the last one is left out."""
        begin = np.maximum(np.searchsorted(self._starts, starts, "right") - 1, 0)
        counts = np.maximum(np.searchsorted(self._starts, np.minimum(stops, len(self)), "left") - begin, 0)
        stretch = np.repeat(np.arange(len(starts)), counts)
        shard = np.arange(len(stretch)) + (begin - np.cumsum(counts) + counts)[stretch]
        before, after = self._starts[shard], self._starts[shard + 1]
        first, last = np.maximum(starts[stretch], before) - before, np.minimum(stops[stretch], after) - before
        there = first < last  # not of a shard without tokens
        return _Spans(stretch[there], shard[there], first[there], last[there])

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


@dataclass(frozen=True)
class _Spans:
    """Hold parts of stretches of tokens, in their order, each in one shard."""

    stretch: Int64s
    shard: Int64s
    first: Int64s
    """The token in the shard that each begins with."""
    last: Int64s
    """The token in the shard before which each ends."""

    def by_shard(self) -> Iterator[tuple[int, Int64s]]:
        """Yield the number of each shard that there is, and the places of its parts."""
        for number in np.unique(self.shard).tolist():
            yield number, np.flatnonzero(self.shard == number)


@lru_cache(maxsize=OPEN)
def _opened(shards: Shards, number: int) -> Tokens:
    """Return an open shard of any corpus."""
    return shards.open(number)


def pieces_of(tokens: Tokens, start: int, stop: int) -> list[Piece]:
    """Return what has to be fetched to read tokens `start` to `stop` of any stream: nothing of a local one."""
    return tokens.pieces(start, stop) if isinstance(tokens, Shards | RemoteTokens) else []
