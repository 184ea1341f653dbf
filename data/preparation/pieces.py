"""Plan which documents are tokenized together, and which shard they go to.

A shard ends with the first piece that fills it, so its contents depend only on the text and the shard size, and are
known before anything is tokenized. A piece ends with a document, except for parts of a text too long to be read at
once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plumbline.data.heldout import HeldOut, too_short
from plumbline.data.inputs.records import Unit
from plumbline.data.preparation.long_text import PART_BYTES
from plumbline.data.preparation.work import UnitFacts, Work


class LongPart(NamedTuple):
    """Describe one part of a document in bytes `begin` to `end` of its file."""

    begin: int
    end: int
    number: int
    held_out: bool

    @property
    def begins(self) -> bool:
        """Return whether the document begins with this part."""
        return self.number == 0

    @property
    def ends(self) -> bool:
        """Return whether the document ends with this part."""
        return self.begin + (self.number + 1) * PART_BYTES >= self.end


class Piece(NamedTuple):
    """Describe consecutive documents of one unit, or a part of a long one."""

    shard: int
    unit: int
    number: int
    """Index of the piece in the unit."""
    first: int
    """Index of its first document in the unit."""
    last: int
    """Index of the document after its last one."""
    at: int | None
    """Position from which to read (inputs/records.py: read_records)."""
    first_at: int
    """Index of the document at that position."""
    source_bytes: int
    """Bytes of text of its documents that are part of the corpus."""
    long: LongPart | None = None


@dataclass(frozen=True)
class Plan:
    """Decide which piece and shard each document goes to."""

    work: Work
    units: list[Unit]
    held_out: HeldOut
    shard_bytes: int | None
    """Bytes of text per shard, or None for one shard."""
    first_documents: list[int]
    """Index of each unit's first document among all documents."""
    kept: npt.NDArray[np.bool_] | None
    """Flags for which documents are part of the corpus, or None if all are."""

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces in the order of the documents."""
        shard = filled = 0
        for number, unit in enumerate(self.units):
            facts = self.work.facts(number)
            if facts is None:
                raise ValueError("the work in progress was removed or changed; run the same command again")
            pieces = self._parts(number, facts) if unit.in_parts else self._of_unit(number, facts)
            for piece in pieces:
                yield piece._replace(shard=shard)
                filled += piece.source_bytes
                ends = piece.long is None or piece.long.ends
                if self.shard_bytes is not None and filled >= self.shard_bytes and ends:
                    shard, filled = shard + 1, 0

    def is_kept(self, unit: int, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Return flags for documents [first, last) of a unit: whether they are part of the corpus."""
        if self.kept is None:
            return np.ones(last - first, np.bool_)
        begin = self.first_documents[unit]
        return self.kept[begin + first : begin + last]

    def _of_unit(self, unit: int, facts: UnitFacts) -> Iterator[Piece]:
        first = first_at = 0
        at: int | None = None
        for number, mark in enumerate(facts.marks):
            size = mark.source_bytes
            if self.kept is not None:
                sizes = self.work.documents(unit)["size"][first : mark.documents]
                size = int(sizes[self.is_kept(unit, first, mark.documents)].sum())
            yield Piece(0, unit, number, first, mark.documents, at, first_at, size)
            first = mark.documents
            if mark.after is not None:
                at, first_at = mark.after, first

    def _parts(self, unit: int, facts: UnitFacts) -> Iterator[Piece]:
        if facts.documents == 0 or not self.is_kept(unit, 0, 1).all():
            return
        row = self.work.documents(unit)[0]
        size, place = int(row["size"]), int(row["place"])
        rule = self.held_out.rule_at(place)
        ranges = [(0, size, place < rule.threshold)]
        if size > rule.cut_above:
            if not 0 < facts.cut < size:
                raise too_short(f"{size} bytes")
            ranges = [(0, facts.cut, False), (facts.cut, size, True)]
        number = 0
        for begin, end, held_out in ranges:
            for part in range(-(-(end - begin) // PART_BYTES)):
                length = min(PART_BYTES, end - begin - part * PART_BYTES)
                yield Piece(0, unit, number, 0, 1, None, 0, length, LongPart(begin, end, part, held_out))
                number += 1
