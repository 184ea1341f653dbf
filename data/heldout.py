"""Which documents are held out for validation, and which ones a tokenizer trains on.

Every document has a place in one order: the hash of its text, keyed by the seed. Validation takes the bottom of that
order, tokenizer training takes from the top. The place does not depend on the other documents or on where the
document lies, so a held-out document stays held out when the corpus grows, and copies of it are held out with it.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash


class Document(NamedTuple):
    """One document and the split it belongs to."""

    text: str
    source_bytes: int
    """UTF-8 bytes of `text`."""
    held_out: bool


@dataclass(frozen=True)
class Survey:
    """What a first pass over the text finds."""

    documents: int
    source_bytes: int
    threshold: int | None
    """Documents whose hash is below this are held out; None where the only document must be cut in two."""
    sample: list[str]
    """Training documents for a tokenizer, topmost first."""


def place(data: bytes, seed: int) -> int:
    """A document's place in the order: 64 bits."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def survey(documents: Iterable[str], fraction: float, seed: int, sample_bytes: int) -> Survey:
    """Count the documents, find where to split them, and keep as many from the top as make `sample_bytes` of text.

    At least one document is held out and at least one is not, whatever the fraction.

    Raises:
        ValueError: there is nothing to split.
    """
    count = total = kept = 0
    lowest, highest = 1 << 64, -1
    top: list[tuple[int, int, int, str]] = []  # a heap of (place, tie-breaker, size, text), lowest place first
    for text in documents:
        data = text.encode()
        where = place(data, seed)
        count, total = count + 1, total + len(data)
        lowest, highest = min(lowest, where), max(highest, where)
        if sample_bytes:
            heapq.heappush(top, (where, -count, len(data), text[:sample_bytes]))
            kept += len(data)
            while kept - top[0][2] >= sample_bytes:  # those above it suffice
                kept -= heapq.heappop(top)[2]
    if count == 0:
        raise ValueError("no document to read: every source is empty or is not UTF-8 text; check --source")
    if count == 1:
        training = cut(top[0][3], fraction)[0] if top else ""
        return Survey(count, total, None, [training])
    if lowest == highest:
        raise ValueError(f"all {count} documents are the same, so none can be held out; check --document-separator")
    threshold = max(min(int(fraction * 2**64), highest), lowest + 1)
    sample = [text for where, _, _, text in sorted(top, reverse=True) if where >= threshold]
    return Survey(count, total, threshold, sample)


def split(documents: Iterable[str], found: Survey, fraction: float, seed: int) -> Iterator[Document]:
    """Mark each document as held out or not; cut a single one in two."""
    for text in documents:
        if found.threshold is None:
            for part, held_out in zip(cut(text, fraction), (False, True), strict=True):
                yield Document(part, len(part.encode()), held_out)
        else:
            data = text.encode()
            yield Document(text, len(data), place(data, seed) < found.threshold)


def cut(text: str, fraction: float) -> tuple[str, str]:
    """Split one long text: its last `fraction`, from the next line start where there is one, is held out.

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
