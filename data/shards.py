"""Concatenate the tokens of many `.bin`/`.idx` pairs into one stream."""

import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import numpy as np

from plumbline.data.damage import DamagedFileError
from plumbline.data.indexed import Int64s, Integers
from plumbline.data.remote.piece import Piece
from plumbline.data.remote.tokens import RemoteTokens

OPEN = 16384
"""Most shards open at a time over all corpora: each takes two of the 65,530 mappings of a process."""
OTHER_FILES = 2048
"""Open files reserved for everything else, such as connections to other ranks."""
FEW = 64
"""Shards that may be open even under a low limit."""


class Tokens(Protocol):
    """Read a stream of tokens and its document starts; `str()` gives its name in messages."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""

    def read(self, start: int, stop: int) -> Integers:
        """Return tokens [start, stop), cut off at the end of the stream."""

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""

    def read_all(self, starts: Int64s, sizes: Int64s) -> Integers:
        """Return n ranges of tokens, concatenated: `sizes` tokens from `starts` on, all within the stream."""

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return the `document_starts` of n ranges, concatenated, preceded by the number of each one's range."""


class Shards:
    """Read several pairs as one, each opened when it is first read.

    Args:
        name: name in messages.
        lengths: number of tokens of each shard.
        num_documents: number of documents in all of them.
        open_shard: opens shard number k.
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
        """Return tokens [start, stop), cut off at the end of the stream; they may span several shards."""
        return self.read_all(np.array([start]), np.array([max(0, min(stop, len(self)) - start)]))

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""
        return self.documents_within(np.array([start]), np.array([stop]))[1]

    def read_all(self, starts: Int64s, sizes: Int64s) -> Integers:
        """Return n ranges of tokens, concatenated: `sizes` tokens from `starts` on, all within the stream."""
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
        """Return the `document_starts` of n ranges, concatenated, preceded by the number of each one's range."""
        spans = self._spans(first, last)
        which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, places in spans.by_shard():
            stretch, after, before = spans.stretch[places], spans.first[places], self._starts[number]
            # A shard begins with a document, which counts unless the range starts there
            entered = after + before > first[stretch]
            its, begins = _opened(self, number).documents_within(after - entered, spans.last[places])
            which.append(stretch[its])
            found.append(begins + before)
        order = np.argsort(np.concatenate(which), kind="stable")  # stable: shards, and starts within each, are in order
        return np.concatenate(which)[order], np.concatenate(found)[order]

    def remote_pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces to fetch before tokens [start, stop) can be read, in order."""
        spans = self._spans(np.array([start]), np.array([stop]))
        bounds = zip(spans.shard.tolist(), spans.first.tolist(), spans.last.tolist(), strict=True)
        return [
            piece for number, first, last in bounds for piece in remote_pieces_of(_opened(self, number), first, last)
        ]

    def _spans(self, starts: Int64s, stops: Int64s) -> "_Spans":
        """Cut n ranges of tokens at shard boundaries; anything beyond the last shard is left out."""
        begin = np.maximum(np.searchsorted(self._starts, starts, "right") - 1, 0)
        counts = np.maximum(np.searchsorted(self._starts, np.minimum(stops, len(self)), "left") - begin, 0)
        stretch = np.repeat(np.arange(len(starts)), counts)
        shard = np.arange(len(stretch)) + (begin - np.cumsum(counts) + counts)[stretch]
        before, after = self._starts[shard], self._starts[shard + 1]
        first, last = np.maximum(starts[stretch], before) - before, np.minimum(stops[stretch], after) - before
        there = first < last  # excludes shards without tokens
        return _Spans(stretch[there], shard[there], first[there], last[there])

    def open(self, number: int) -> Tokens:
        """Open one shard.

        Raises:
            DamagedFileError: it is missing or damaged, or does not match the manifest.
        """
        shard, expected = self._open_shard(number), self._starts[number + 1] - self._starts[number]
        if len(shard) != expected:
            raise DamagedFileError(
                f"{shard}: {len(shard)} tokens where the corpus's manifest makes {expected} of its size; prepare the "
                "corpus again with --overwrite"
            )
        return shard


@dataclass(frozen=True)
class _Spans:
    """Hold parts of token ranges, in order, each within one shard."""

    stretch: Int64s
    shard: Int64s
    first: Int64s
    """First token of each part, counted within the shard."""
    last: Int64s
    """Token after the last one of each part, counted within the shard."""

    def by_shard(self) -> Iterator[tuple[int, Int64s]]:
        """Yield the number of each shard involved, and the indices of its parts."""
        for number in np.unique(self.shard).tolist():
            yield number, np.flatnonzero(self.shard == number)


def most_open(files: int) -> int:
    """Return how many shards may be open at a time in a process that may have so many open files: each is two.

    A mapping keeps a descriptor of its file for itself, whether the one that it was made of is closed or not.
    """
    return OPEN if files == resource.RLIM_INFINITY else max(FEW, min(OPEN, (files - OTHER_FILES) // 2))


@cache
def _kept() -> Callable[[Shards, int], Tokens]:
    """Return what opens a shard and keeps it open; made late, for commands raise their limit when they start."""
    return lru_cache(maxsize=most_open(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))(Shards.open)


def _opened(shards: Shards, number: int) -> Tokens:
    """Return an open shard, from a cache that all corpora share."""
    return _kept()(shards, number)


def remote_pieces_of(tokens: Tokens, start: int, stop: int) -> list[Piece]:
    """Return the pieces to fetch before tokens [start, stop) can be read: none for a local stream."""
    return tokens.remote_pieces(start, stop) if isinstance(tokens, Shards | RemoteTokens) else []
