"""Combine the findings of the survey, unit by unit in order."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from plumbline.data.heldout import Sample
from plumbline.data.inputs.records import Unit
from plumbline.data.preparation.survey import EXAMPLES
from plumbline.data.preparation.work import Bad, Lost, UnitFacts
from plumbline.data.sources import printable


@dataclass
class Surveyed:
    """Hold the findings of the survey in all units."""

    units: list[Unit]
    sample: Sample
    first_documents: list[int] = field(default_factory=list)
    """Index of each unit's first document among all documents."""
    documents: int = 0
    source_bytes: int = 0
    documents_of: Counter[int] = field(default_factory=Counter)
    """Number of documents by index of their source."""
    tasks: int = 0
    """Number of positions from which units can be read."""
    skipped: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    first_bad: dict[int, str] = field(default_factory=dict)
    """The first bad record by index of its source."""
    lost: Lost = field(default_factory=Lost)
    records: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Number of lines or rows, documents or not, by the file names of their unit."""

    def add(self, unit: Unit, facts: UnitFacts, entries: Iterable[tuple[int, int, int, str]]) -> None:
        """Add the findings of the next unit.

        Args:
            unit: the unit after those already added.
            facts: the findings in it.
            entries: its candidates for the sample, as arguments of `Sample.add`.

        Raises:
            ValueError: its last bad record ends the work; names file and line.
        """
        texts = [_located(bad, self.records[unit.names]) for bad in facts.bad]
        if facts.fatal:
            raise ValueError(f"{texts[-1]} (--on-bad-record skip leaves such out)")
        self.records[unit.names] += facts.records
        self.bad.extend(texts[: EXAMPLES - len(self.bad)])
        for text in texts[:1]:
            self.first_bad.setdefault(unit.source, text)
        self.lost = self.lost.plus(facts.lost)
        self.skipped.update(facts.skipped)
        self.first_documents.append(self.documents)
        self.documents += facts.documents
        self.documents_of[unit.source] += facts.documents
        self.source_bytes += facts.source_bytes
        self.tasks += bool(facts.marks) + sum(mark.after is not None for mark in facts.marks[:-1])
        for entry in entries:
            self.sample.add(*entry)


def _located(bad: Bad, before: int) -> str:
    """Return file, line and reason of a bad record in a unit that starts after `before` records of its file."""
    number = str(before + bad.number)
    where = bad.where.replace("{line}", number).replace("{row}", number)
    return printable(f"{where}: {bad.detail or bad.reason}")
