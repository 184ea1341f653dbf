"""Choose which documents are held out for validation, and which ones a tokenizer trains on.

Every document has a place in one order: the hash of its text, keyed by the seed. Validation takes the bottom of that
order, tokenizer training takes from the top. The place does not depend on the other documents or on where the
document lies, so a held-out document stays held out when the corpus grows, and copies of it are held out with it.

Where documents are few or of very different sizes, whole ones can miss the share of the text that was asked for by far.
If they miss it by more than a factor of two, the large ones are cut instead: the last part of each is held out, and
where it begins depends on that document alone.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

LARGE = 1 / 16  # of the text to be held out: when only smaller documents are left whole, their number evens out
TOLERANCE = 2.0


class Document(NamedTuple):
    """Hold one document, or a part of one, and the split it belongs to."""

    text: str
    source_bytes: int
    """UTF-8 bytes of `text`."""
    held_out: bool


@dataclass(frozen=True)
class Survey:
    """Hold what a first pass over the text counts and decides."""

    documents: int
    source_bytes: int
    threshold: int
    """Documents whose hash is below this are held out, as long as they are not cut."""
    cut_above: float
    """Documents of more bytes than this are cut in two; infinite where none is."""
    sample: list[str]
    """Training documents for a tokenizer, topmost first."""


def place(data: bytes, seed: int) -> int:
    """Return a document's place in the order: 64 bits."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def survey(documents: Iterable[str], fraction: float, seed: int, sample_bytes: int) -> Survey:
    """Count the documents, find where to split them, and keep as many from the top as make `sample_bytes` of text.

    Neither split is empty, whatever the fraction.

    Raises:
        ValueError: there is nothing to split.
    """
    count = total = kept = below = at_lowest = at_highest = 0
    asked, lowest, highest = int(fraction * 2**64), 1 << 64, -1
    top: list[tuple[int, int, int, str]] = []  # a heap of (place, tie-breaker, size, text), lowest place first
    for text in documents:
        data = text.encode()
        where = place(data, seed)
        count, total = count + 1, total + len(data)
        if where < lowest:
            lowest, at_lowest = where, 0
        if where > highest:
            highest, at_highest = where, 0
        at_lowest += len(data) * (where == lowest)
        at_highest += len(data) * (where == highest)
        below += len(data) * (where < asked)
        if sample_bytes:
            heapq.heappush(top, (where, -count, len(data), text[:sample_bytes]))
            kept += len(data)
            while kept - top[0][2] >= sample_bytes:  # those above it suffice
                kept -= heapq.heappop(top)[2]
    if count == 0:
        raise ValueError("no document to read: every source is empty or is not UTF-8 text; check --source")
    if count > 1 and lowest == highest:
        raise ValueError(f"all {count} documents are the same, so none can be held out; check --document-separator")
    threshold = max(min(asked, highest), lowest + 1)
    held_out = at_lowest if asked <= lowest else total - at_highest if asked > highest else below
    if count == 1:
        cut_above = -1.0
    elif is_near(held_out / total, fraction):
        cut_above = math.inf
    else:  # four bytes are the longest character, and each part needs one
        cut_above = max(LARGE * fraction * total, 4 / fraction, 4 / (1 - fraction))
    sample = [
        cut(text, fraction)[0] if size > cut_above else text
        for where, _, size, text in sorted(top, reverse=True)
        if size > cut_above or where >= threshold
    ]
    return Survey(count, total, threshold, cut_above, sample)


def is_near(share: float, fraction: float) -> bool:
    """Return whether the share that is held out is within a factor of two of the fraction that was asked for."""
    return fraction / TOLERANCE <= share <= fraction * TOLERANCE


def split(documents: Iterable[str], surveyed: Survey, fraction: float, seed: int) -> Iterator[Document]:
    """Mark each document as held out or not; cut the large ones in two where the survey says so."""
    for text in documents:
        data = text.encode()
        if len(data) > surveyed.cut_above:
            for part, held_out in zip(cut(text, fraction), (False, True), strict=True):
                yield Document(part, len(part.encode()), held_out)
        else:
            yield Document(text, len(data), place(data, seed) < surveyed.threshold)


def cut(text: str, fraction: float) -> tuple[str, str]:
    """Split one text: its last `fraction`, from the next line start where there is one, is held out.

    Raises:
        ValueError: one of the two parts would be empty.
    """
    at = int(len(text) * (1 - fraction))
    line_start = text.find("\n", at) + 1
    at = line_start if 0 < line_start < len(text) else at
    if not 0 < at < len(text):
        raise ValueError(
            f"the only document has {len(text)} characters, too few to hold some out; give more text, "
            "or cut it into documents with --document-separator"
        )
    return text[:at], text[at:]
