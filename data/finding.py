"""Find the documents and examples of a training split that contain a text, and the windows that hold them.

The tokens are searched in pieces, regardless of documents, so memory does not grow with the corpus.
`TrainOrder.samples_of` tells which samples read a window.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from plumbline.data.corpus import Split
from plumbline.data.indexed import Int64s
from plumbline.data.streams import IGNORED, SampleSource, training_split
from plumbline.data.tasks.source import TaskStream
from plumbline.data.tokenizers import Decoder

BLOCK = 2**22
"""Tokens searched by their bytes at a time."""

PIECE, PIECES = 2**13, 2**7
"""Tokens decoded in one piece, and pieces decoded at a time."""

MARGIN = 16
"""Extra tokens on either side of a piece: the first and last tokens of a text may decode differently."""

PLACES = 1000
"""Most occurrences looked for in one document, which may be a whole corpus."""


@dataclass(frozen=True)
class Found:
    """Hold where a text was found: a document of a corpus, or an example of a task."""

    first: int
    """Token of the split at which the document begins; number of the example."""
    stop: int
    """Token before which it ends; number of the next example."""
    windows: Sequence[int]
    """Windows that hold a part of the document as input; empty if it is only the split's last few tokens."""
    text_windows: Sequence[int]
    """Those of `windows` that hold the text."""
    more: bool = False
    """Whether later windows may hold the text as well, because the search stopped after `PLACES` occurrences."""


Holding = Callable[[int, int], Sequence[int]]
"""Returns the windows that hold any of the tokens [first, stop) as input."""


def find(source: SampleSource, text: str, length: int | None, packed: Holding | None = None) -> Iterator[Found]:
    """Yield the documents or examples of the training split of a source that contain a text.

    Args:
        source: a corpus, or a task whose examples are text.
        text: what to look for, verbatim.
        length: tokens of a window; None reports no windows.
        packed: finds windows that are packed; None means that the corpus is read end to end.

    Raises:
        ValueError: the text is empty, or the source has no text.
    """
    if not text:
        raise ValueError("--find: an empty text is everywhere; give some characters")
    if source.tokenizer_path is None:
        raise ValueError(f"--find {text!r}: {source} has no tokenizer, so no text can be found in it")
    decoder, split = Decoder(source.tokenizer_path), training_split(source)
    if isinstance(split, TaskStream):
        return _among_examples(split, text, decoder)
    assert isinstance(split, Split), "a source is a corpus or a task"
    return _among_documents(split, text, decoder, length, packed)


def _among_examples(stream: TaskStream, text: str, decoder: Decoder) -> Iterator[Found]:
    for number in range(stream.task.num_examples("train")):
        tokens, labels = stream.task.example("train", number)
        last = labels[-1:][labels[-1:] != IGNORED]
        if text in decoder([*tokens.tolist(), *last.tolist()]):
            yield Found(number, number + 1, range(number, number + 1), range(number, number + 1))


def _end_to_end(split: Split, length: int | None) -> Holding:
    windows = range(split.training_windows(length)) if length else range(0)
    return lambda first, stop: windows[first // length : (stop - 1) // length + 1] if length else windows


def _among_documents(
    split: Split, text: str, decoder: Decoder, length: int | None, packed: Holding | None
) -> Iterator[Found]:
    holding = packed or _end_to_end(split, length)
    start = 0
    while place := next_occurrence(split, text, decoder, start, split.num_tokens):
        begin, stop = document_around(split, place[0])
        places = _places(split, text, decoder, place, stop, length, begin if packed else 0) if length else ()
        windows = sorted({window for place in islice(places, PLACES) for window in holding(*place)})
        yield Found(begin, stop, holding(begin, stop), windows, next(iter(places), None) is not None)
        start = stop


def _places(
    split: Split, text: str, decoder: Decoder, first: tuple[int, int], stop: int, length: int, origin: int
) -> Iterator[tuple[int, int]]:
    """Yield the first range of tokens that spells a text, then one for each further window before `stop` that has one.

    Args:
        split: what is read.
        text: what to look for.
        decoder: of the tokens.
        first: the first range.
        stop: the end of its document.
        length: tokens of a window.
        origin: a token at which a window begins, or would.
    """
    longest = len(text.encode())  # each token of the text spells a byte of it or more
    place: tuple[int, int] | None = first
    while place:
        yield place
        end = place[1] + (origin - place[1]) % length  # of the window
        # An occurrence that begins earlier ends in a window already found
        place = next_occurrence(split, text, decoder, max(place[0] + 1, end - longest + 1), stop)


def document_around(split: Split, token: int) -> tuple[int, int]:
    """Return the range [first, stop) of the document that holds a token."""
    reach = 256
    begins = _begins(split, token - reach, token + 1)
    while not begins.size and reach <= token:
        reach *= 4
        begins = _begins(split, token - reach, token + 1)
    return int(begins[-1]) if begins.size else 0, next_document(split, token)


def next_document(split: Split, token: int) -> int:
    """Return the first token after `token` at which a document begins, or the end of the split."""
    reach = 256
    begins = _begins(split, token, token + reach)
    while not begins.size and token + reach < split.num_tokens:
        reach *= 4
        begins = _begins(split, token, token + reach)
    return int(begins[0]) if begins.size else split.num_tokens


def _begins(split: Split, after: int, before: int) -> Int64s:
    """Return the tokens strictly between two at which a document begins."""
    return split.indexed.document_starts(max(-1, after), min(before, split.num_tokens))


def next_occurrence(split: Split, text: str, decoder: Decoder, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first range of tokens that spells a text and begins in [start, stop), or None if there is none."""
    search = _in_bytes if decoder.is_bytes else _in_pieces
    return search(split, text, decoder, start, stop)


def _in_bytes(split: Split, text: str, _decoder: Decoder, start: int, stop: int) -> tuple[int, int] | None:
    """Look for a text in a split whose tokens are bytes, without decoding."""
    size = len(text.encode())
    pattern = np.frombuffer(text.encode(), np.uint8).astype("<u2").tobytes()
    for first in range(start, stop, BLOCK):
        data = split.indexed.read(first, min(first + BLOCK, stop) + size - 1).astype("<u2", copy=False).tobytes()
        place = data.find(pattern)
        while place % 2 == 1 and place > 0:  # between two tokens
            place = data.find(pattern, place + 1)
        if place >= 0:
            return first + place // 2, first + place // 2 + size
    return None


def _in_pieces(split: Split, text: str, decoder: Decoder, start: int, stop: int) -> tuple[int, int] | None:
    """Look for a text by decoding pieces of tokens, a few at first since the next occurrence may be near."""
    behind = len(text.encode()) + MARGIN  # each token of the text spells a byte of it or more
    pieces = 1
    while start < stop:
        begins = range(start, min(stop, start + pieces * PIECE), PIECE)
        ends = [min(begin + PIECE, stop) for begin in begins]
        lows = [max(0, begin - MARGIN) for begin in begins]
        tokens = split.indexed.read(lows[0], ends[-1] + behind)
        ids = [tokens[low - lows[0] : end + behind - lows[0]].tolist() for low, end in zip(lows, ends, strict=True)]
        for begin, end, low, its, decoded in zip(begins, ends, lows, ids, decoder.pieces(ids), strict=True):
            for first, last in _within(its, text, decoder) if text in decoded else ():
                if begin <= low + first < end:  # others are found in the piece where they begin
                    return low + first, low + last
        start = ends[-1]
        pieces = min(2 * pieces, PIECES)
    return None


def _within(ids: Sequence[int], text: str, decoder: Decoder) -> Iterator[tuple[int, int]]:
    """Yield the ranges of tokens that spell a text in a piece, by bisection: only decoding tells what tokens spell."""
    offset = 0
    while text in decoder(ids[offset:]):
        low, stop = offset, len(ids)  # the text is in ids[offset:stop], and not in ids[offset:low]
        while stop - low > 1:
            middle = (low + stop) // 2
            low, stop = (low, middle) if text in decoder(ids[offset:middle]) else (middle, stop)
        start, high = offset, stop  # the text is in ids[start:stop], and not in ids[high:stop]
        while high - start > 1:
            middle = (start + high) // 2
            start, high = (middle, high) if text in decoder(ids[middle:stop]) else (start, middle)
        yield start, stop
        offset = start + 1
