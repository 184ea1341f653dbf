"""Pack documents into windows without cutting any that fits: "best-fit decreasing" (Fewer Truncations, 2404.10830).

A document of n tokens is n inputs, each of which predicts the next token in the stream; its end-of-text token predicts
the first token of the next document, as under `concat`. Documents longer than a window are cut into whole windows and a
rest. Longest first, each of these pieces goes into the fullest window that has room for it. So an epoch trains on every
pair of a token and its successor in the stream exactly once, whatever the packing.

Packing is a pure function of the documents' lengths and the window. Documents are packed in blocks, so memory stays
bounded for a corpus of any size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plumbline.data.boundaries import Documents, Int64s

BLOCK = 2**28
"""Tokens of one block; a document belongs to the block in which it ends."""


@dataclass(frozen=True)
class Block:
    """Hold the packed windows of one block."""

    starts: Int64s
    """[pieces]: the position in the stream at which each piece begins, window after window."""
    lengths: Int64s
    """[pieces]: number of inputs of each piece."""
    counts: Int64s
    """[windows]: number of pieces in each window."""
    documents: int
    """Documents with at least one token to predict."""
    cut: int
    """Documents longer than a window."""


def packed_blocks(stream: Documents, length: int, block: int = BLOCK) -> Iterator[Block]:
    """Yield the windows of `length` tokens that hold a whole stream, block by block."""
    total = len(stream)
    pending = 0  # start of the document that has not ended yet
    for first in range(0, total, block):
        starts = stream.document_starts(first, min(first + block + 1, total))
        bounds = np.concatenate([[pending], starts])
        if first + block >= total:
            bounds = np.append(bounds, total - 1)  # the last token of the stream has nothing to predict
        if len(bounds) > 1:
            yield pack(bounds[:-1], np.diff(bounds), length)
        pending = int(bounds[-1])


def pack(starts: Int64s, lengths: Int64s, length: int) -> Block:
    """Pack documents, given by their starts [n] and numbers of inputs [n], into windows of `length` tokens."""
    pieces = -(-lengths // length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    before = (np.arange(len(document)) - (np.cumsum(pieces) - pieces)[document]) * length
    sizes = np.minimum(length, lengths[document] - before)
    window = best_fit_decreasing(sizes, length)
    order = np.argsort(window, kind="stable")
    return Block(
        starts=(starts[document] + before)[order],
        lengths=sizes[order],
        counts=np.bincount(window),
        documents=int(np.count_nonzero(pieces)),
        cut=int(np.count_nonzero(pieces > 1)),
    )


def best_fit_decreasing(sizes: Int64s, capacity: int) -> Int64s:
    """Return the bin of each item [n]: longest first, each into the fullest bin that has room, or into a new one.

    Bins with equal room are used in turn, and items of equal size in order. Equal items are placed together: a bin with
    room r takes floor(r / size) of them before the next fullest bin is considered. So the time grows with the number of
    items plus at most sizes x rooms, not with items x bins.

    Args:
        sizes: From 1 to `capacity`.
        capacity: Size of each bin.
    """
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(len(sizes), np.int64)
    rooms = _Rooms(capacity)
    ends = np.flatnonzero(np.diff(sizes[order], append=0)) + 1
    for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        size = int(sizes[order[begin]])
        while begin < end:
            room, found = rooms.take(size, end - begin)
            each = room // size
            chosen = np.repeat(found, each)[: end - begin]
            bins[order[begin : begin + len(chosen)]] = chosen
            begin += len(chosen)
            rest = each * len(found) - len(chosen)  # items that the last of these bins still has room for
            rooms.give(room - each * size, found[: len(found) - (rest > 0)])
            if rest:
                rooms.give(room - (each - rest) * size, found[-1:])
    return bins


class _Rooms:
    """Keep bins sorted by the room left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._bins: dict[int, list[Int64s]] = {}
        self._known = 0  # bit r: there are bins with room r
        self._opened = 0

    def take(self, size: int, items: int) -> tuple[int, Int64s]:
        """Remove and return the fullest bins with room for `size`, as many as `items` items need, or new ones."""
        fitting = self._known >> size
        if not fitting:
            count = -(-items // (self._capacity // size))
            self._opened += count
            return self._capacity, np.arange(self._opened - count, self._opened)
        room = size + (fitting & -fitting).bit_length() - 1
        bins = self._bins[room]
        count = -(-items // (room // size))
        found, bins[0] = bins[0][:count], bins[0][count:]
        if not len(bins[0]):
            del bins[0]
        if not bins:
            self._known &= ~(1 << room)
        return room, found

    def give(self, room: int, bins: Int64s) -> None:
        """Put back bins with this much room."""
        if room and len(bins):
            self._bins.setdefault(room, []).append(bins)
            self._known |= 1 << room
