"""Choose which documents are held out for validation, and which ones a tokenizer trains on.

Every document has a place in one order: the hash of its text, keyed by the seed. Validation takes the bottom of that
order, tokenizer training the top. A document's place depends on neither the other documents nor its location, so a
held-out document stays held out when the corpus grows, and its copies are held out with it.

If documents are few or of very different sizes, holding out whole ones can be far off the requested share of the text.
If it is off by more than a factor of two, the large ones are cut instead: the last part of each is held out, and where
it begins depends on that document alone.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from plumbline.data.sizes import counted

UInt64s = npt.NDArray[np.uint64]

LARGE = 1 / 16  # of the text to be held out: when only smaller documents are left whole, their number evens out
TOLERANCE = 2.0
EVERYTHING = 1 << 64
"""A place above that of every document."""


class Document(NamedTuple):
    """Hold one document, or a part of one, and the split it belongs to."""

    text: str
    source_bytes: int
    """UTF-8 bytes of `text`."""
    held_out: bool


@dataclass(frozen=True)
class HeldOut:
    """Hold what a first pass over the text decides."""

    fraction: float
    """The requested share; also the share held out of a document that is cut."""
    documents: int
    source_bytes: int
    threshold: int
    """Documents whose hash is below this are held out, unless they are cut."""
    cut_above: float
    """Documents of more bytes than this are cut in two; infinite if none is."""
    exception: "tuple[int, HeldOut] | None" = None
    """One place, and the rule for the documents there."""

    def rule_at(self, where: int) -> "HeldOut":
        """Return the rule for the documents at a place."""
        return self.exception[1] if self.exception and where == self.exception[0] else self

    def split(self, text: str, size: int, where: int) -> Iterator[Document]:
        """Mark a document as held out or not, or cut a large one in two if the rule says so.

        Args:
            text: The document.
            size: Its bytes.
            where: Its place.
        """
        rule = self.rule_at(where)
        if size > rule.cut_above:
            for part, held_out in zip(cut(text, rule.fraction), (False, True), strict=True):
                yield Document(part, len(part.encode()), held_out)
        else:
            yield Document(text, size, where < rule.threshold)


def place(data: bytes, seed: int) -> int:
    """Return a document's place in the order, a 64-bit hash."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def choose(parts: Iterable[tuple[UInt64s, UInt64s]], fraction: float) -> HeldOut:
    """Find where to split the documents. Neither split is empty, unless everything is held out.

    Args:
        parts: Places and sizes in bytes of the documents, some at a time.
        fraction: Share of the text to hold out; 1 holds out all of it.

    Raises:
        ValueError: there is nothing to split.
    """
    count = total = below = at_lowest = at_highest = 0
    asked, lowest, highest = threshold_of(fraction), EVERYTHING, -1
    for places, sizes in parts:
        if not len(places):
            continue
        if (least := int(places.min())) < lowest:
            lowest, at_lowest = least, 0
        if (most := int(places.max())) > highest:
            highest, at_highest = most, 0
        count, total = count + len(places), total + int(sizes.sum())
        at_lowest += int(sizes[places == np.uint64(lowest)].sum())
        at_highest += int(sizes[places == np.uint64(highest)].sum())
        below += int(sizes[places < np.uint64(asked)].sum())
    assert count, "whoever asks has looked"
    if fraction == 1:
        return HeldOut(fraction, count, total, EVERYTHING, math.inf)
    if count > 1 and lowest == highest:
        raise ValueError(
            f"all {count} documents are the same, so none can be held out; give more text, or see to "
            "--document-separator if it cuts files of text"
        )
    threshold = max(min(asked, highest), lowest + 1)
    held_out = at_lowest if asked <= lowest else total - at_highest if asked > highest else below
    if count == 1:
        cut_above = -1.0
    elif is_near(held_out / total, fraction):
        cut_above = math.inf
    else:
        cut_above = max(LARGE * fraction * total, smallest_cut(fraction))
    return HeldOut(fraction, count, total, threshold, cut_above)


def threshold_of(fraction: float) -> int:
    """Return the place below which documents are held out, if there are many of them."""
    return min(int(fraction * EVERYTHING), EVERYTHING - 1)


def as_before(rule: HeldOut) -> HeldOut:
    """Return the rule for documents that are added to a corpus for which `choose` made `rule`.

    If none or all of the earlier documents were below the requested threshold, `choose` put the threshold next to one
    of them, wherever that was. A document at that one place is treated as before; everything else follows the requested
    threshold.
    """
    asked = threshold_of(rule.fraction)
    single = rule.cut_above < 0  # one document, cut whatever its size
    beside = rule.threshold - 1 if single or rule.threshold > asked else rule.threshold
    return replace(
        rule,
        threshold=asked,
        cut_above=math.inf if single else rule.cut_above,
        exception=None if rule.threshold == asked else (beside, rule),
    )


def smallest_cut(fraction: float) -> float:
    """Return the fewest bytes of a document that can be cut: each part needs a character, of up to four bytes."""
    return max(4 / fraction, 4 / (1 - fraction))


class Sample:
    """Keep the topmost documents that together have `wanted` bytes, in whatever order they arrive."""

    def __init__(self, wanted: int, bound: int = -1) -> None:
        """Start empty.

        Args:
            wanted: Bytes of text; 0 keeps nothing.
            bound: Documents below this place are known to be of no use.
        """
        self._wanted = wanted
        self._bound = bound
        self._kept = 0
        self._top: list[tuple[int, int, int, str]] = []  # a heap of (place, -number, size, text), lowest place first

    @property
    def bound(self) -> int:
        """Return the place below which a document is no longer of use."""
        return self._top[0][0] if self._top and self._kept >= self._wanted else self._bound

    def wants(self, where: int) -> bool:
        """Return whether a document at this place may be of use."""
        return self._wanted > 0 and where >= self.bound

    def add(self, where: int, number: int, size: int, text: str) -> None:
        """Keep a document of `size` bytes until those above it suffice.

        Args:
            where: Its place.
            number: Distinguishes it from others at the same place.
            size: Its bytes.
            text: The document; only the first `wanted` characters are kept.
        """
        if not self.wants(where):
            return
        heapq.heappush(self._top, (where, -number, size, text[: self._wanted]))
        self._kept += size
        while self._kept - self._top[0][2] >= self._wanted:  # those above it suffice
            self._kept -= heapq.heappop(self._top)[2]

    def entries(self) -> Iterator[tuple[int, int, int, str]]:
        """Yield the arguments of `add`, (place, number, size, text), for each document kept, in no order."""
        for where, number, size, text in self._top:
            yield where, -number, size, text

    def training_texts(self, held_out: HeldOut, is_kept: Callable[[int], bool]) -> list[str]:
        """Return the texts that a tokenizer may train on, topmost first, without what is held out.

        Args:
            held_out: Decides what is held out.
            is_kept: Returns whether a document, by its number, is part of the corpus.
        """
        return [
            document.text
            for where, number, size, text in sorted(self._top, reverse=True)
            if is_kept(-number)
            for document in held_out.split(text, size, where)
            if not document.held_out
        ]


def is_near(share: float, fraction: float) -> bool:
    """Return whether the held-out share is within a factor of two of the requested fraction."""
    return fraction / TOLERANCE <= share <= fraction * TOLERANCE


def cut(text: str, fraction: float) -> tuple[str, str]:
    """Split one text: its last `fraction` is held out, from the next line start if there is one.

    Of a text that is too large to be read at once, `preparation.long_text.byte_of_cut` finds the same place.

    Raises:
        ValueError: one of the two parts would be empty.
    """
    at = int(len(text) * (1 - fraction))
    line_start = text.find("\n", at) + 1
    at = line_start if 0 < line_start < len(text) else at
    if not 0 < at < len(text):
        raise too_short(counted(len(text), "character"))
    return text[:at], text[at:]


def too_short(what: str) -> ValueError:
    """Return the error for a document that cannot be cut."""
    return ValueError(
        f"the only document has {what}, too few to hold some out; give more text, or cut it into documents with "
        "--document-separator"
    )
