"""Survey every document of a unit once: count it, hash it, and keep a sample for the tokenizer."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plumbline.data.heldout import Sample, place
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import BINARY, EMPTY, HARMLESS, NOT_UTF8, Record, Unit, read_records
from plumbline.data.inputs.texts import LOOKED_AT, is_binary, not_utf8
from plumbline.data.preparation.duplicates import keys_of, keys_of_long_text
from plumbline.data.preparation.long_text import byte_of_cut, scan
from plumbline.data.preparation.work import Bad, Lost, Mark, UnitFacts, Work, whole

PIECE_BYTES = 4 << 20
"""Bytes of text that one process tokenizes in one go, or more if the input cannot be cut."""
EXAMPLES = 20
"""Most bad records that are reported with file and line."""


@dataclass(frozen=True)
class SurveyJob:
    """Hold the settings shared by the survey of all units."""

    reading: Reading
    work: Work
    seed: int
    fraction: float
    sample_bytes: int
    deduplicate: str | None
    skip_bad: bool
    piece_bytes: int
    """Bytes of text after which a piece ends."""


def survey_unit(job: SurveyJob, number: int, unit: Unit, bound: int) -> None:
    """Survey one unit and save the findings; see `Work` for the files.

    Args:
        job: The shared settings.
        number: Number of the unit.
        unit: What to read.
        bound: Documents below this place are not wanted for the sample.
    """
    sample = Sample(job.sample_bytes, bound)
    with whole(job.work.unit(number, "documents")) as path:
        facts = (_survey_long_text if unit.in_parts else _survey)(job, number, unit, sample, path)
    with whole(job.work.unit(number, "sample")) as path, path.open("w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in sample.entries())
    job.work.keep_facts(number, facts)


def sample_entries(work: Work, unit: int) -> Iterator[tuple[int, int, int, str]]:
    """Yield a unit's candidates for the sample, as arguments of `Sample.add`."""
    with work.unit(unit, "sample").open() as file:
        for line in file:
            where, number, size, text = json.loads(line)
            yield where, number, size, text


def document_number(unit: int, index: int) -> int:
    """Return a unique number for a document that preserves the order of the documents."""
    return unit << 40 | index


def _survey(job: SurveyJob, number: int, unit: Unit, sample: Sample, path: Path) -> UnitFacts:
    found = _Found(job)
    with path.open("wb") as file:
        for record in read_records(job.reading, unit):
            found.records += 1
            if record.reason is not None:
                if found.leave_out(record, record.reason):
                    break
                if unit.format.is_text and record.reason in (NOT_UTF8, BINARY):
                    found.lost = found.lost.plus(_lost(record.where, record.detail))
            elif record.text is not None:
                data = record.text.encode()
                where = place(data, job.seed)
                sample.add(where, document_number(number, found.documents), len(data), record.text)
                found.add(where, len(data), keys_of(record.text, data, job.deduplicate))
                if found.in_piece >= job.piece_bytes:
                    file.write(found.end_piece(record.after))
        file.write(found.end_piece(None))
    return UnitFacts(
        found.documents,
        sum(mark.source_bytes for mark in found.marks),
        found.records,
        found.marks,
        dict(found.skipped),
        found.bad,
        found.fatal,
        found.lost,
    )


def _lost(name: str, problem: str) -> Lost:
    size = Path(name).stat().st_size
    return Lost(size, size, f"{name}: {problem}")


class _Found:
    """Collect the findings in a unit."""

    def __init__(self, job: SurveyJob) -> None:
        self.documents = self.records = self.in_piece = 0
        self.skipped: Counter[str] = Counter()
        self.bad: list[Bad] = []
        self.marks: list[Mark] = []
        self.fatal = False
        self.lost = Lost()
        self._job = job
        self._rows: list[tuple[int, int, list[int]]] = []

    def add(self, where: int, size: int, keys: list[int]) -> None:
        self._rows.append((where, size, keys))
        self.documents += 1
        self.in_piece += size

    def leave_out(self, record: Record, reason: str) -> bool:
        """Count a record that is not a document; return whether it ends the work."""
        self.skipped[reason] += 1
        self.fatal = reason not in HARMLESS and not self._job.skip_bad
        if reason != EMPTY and (self.fatal or len(self.bad) < EXAMPLES):
            self.bad.append(Bad(record.where, record.number, reason, record.detail))
        return self.fatal

    def end_piece(self, after: int | None) -> bytes:
        """End the current piece if it is not empty; return the rows of its documents."""
        if not self._rows:
            return b""
        rows = np.array(self._rows, self._job.work.row).tobytes()
        self.marks.append(Mark(self.documents, self.in_piece, after))
        self._rows.clear()
        self.in_piece = 0
        return rows


def _survey_long_text(job: SurveyJob, number: int, unit: Unit, sample: Sample, path: Path) -> UnitFacts:
    (name,) = unit.names
    with Path(name).open("rb") as file:
        binary = is_binary(file.read(LOOKED_AT))
        found = None if binary else scan(Path(name), job.seed)
        file.seek(0)
        problem = "a binary file" if binary else not_utf8(file) if found is None else None
    if problem:
        path.touch()
        reason = BINARY if binary else NOT_UTF8
        bad = [Bad(name, 0, reason, problem)]
        return UnitFacts(0, 0, 0, [], {reason: 1}, bad, fatal=False, lost=_lost(name, problem))
    if found is None or found.blank:
        path.touch()
        return UnitFacts(0, 0, 0, [], {EMPTY: 1}, [], fatal=False)
    keys: list[int] = []
    if job.deduplicate:
        digest = scan(Path(name), seed=0)
        keys = keys_of_long_text(digest.place if digest else 0, job.deduplicate)
    path.write_bytes(np.array([(found.place, found.size, keys)], job.work.row).tobytes())
    if sample.wants(found.place):
        with Path(name).open(encoding="utf-8-sig", newline="") as file:
            sample.add(found.place, document_number(number, 0), found.size, file.read(job.sample_bytes))
    cut = byte_of_cut(Path(name), int(found.characters * (1 - job.fraction)))
    return UnitFacts(1, found.size, 0, [Mark(1, found.size, None)], {}, [], fatal=False, cut=cut)
