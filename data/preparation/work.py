"""Save finished work in files inside the future corpus folder, so that a killed run can be resumed.

    units/00007.json        what the survey found in one unit, written last
    units/00007.documents   a row for each of its documents: place, bytes, hashes for duplicates
    units/00007.sample      documents of it that a tokenizer may train on
    pieces/00003/00007-00012.npz   tokens of one piece of a unit, for shard 3
    shards/00003.json       what a finished shard holds, written last; shards/00003.npy: its token counts

Every file is written under another name and then renamed, so a file that exists is complete.
"""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plumbline.data.disk import sync


class Mark(NamedTuple):
    """Mark where a piece of a unit ends."""

    documents: int
    """Number of documents of the unit up to here."""
    source_bytes: int
    """Bytes of the piece's text."""
    after: int | None
    """Position from which reading can resume (inputs/records.py: Record), or None if it cannot."""


class Bad(NamedTuple):
    """Hold a record that is not a document."""

    where: str
    number: int
    reason: str
    detail: str


class Lost(NamedTuple):
    """Summarise the files that are left out whole because they are not UTF-8 or binary."""

    size: int = 0
    """Bytes of all of them."""
    largest: int = 0
    """Bytes of the largest."""
    problem: str = ""
    """Name of the largest, and what is wrong with it."""

    def plus(self, other: "Lost") -> "Lost":
        """Return the summary of the files of both."""
        _, largest, problem = max(self, other, key=lambda lost: lost.largest)
        return Lost(self.size + other.size, largest, problem)


@dataclass(frozen=True)
class UnitFacts:
    """Hold the findings of the survey in one unit."""

    documents: int
    source_bytes: int
    records: int
    """Number of lines or rows, documents or not."""
    marks: list[Mark]
    skipped: dict[str, int]
    """Number of records left out, by reason."""
    bad: list[Bad]
    """The first of those worth reporting."""
    fatal: bool
    """Whether the last of `bad` ends the work."""
    lost: Lost = field(default_factory=Lost)
    cut: int = 0
    """Byte at which to cut a long text, if a part of it is held out."""


@dataclass(frozen=True)
class Work:
    """Find the files of the work in progress."""

    folder: Path
    keys: int
    """Number of duplicate-detection hashes per document."""

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the tokenizer, which is part of the corpus."""
        return self.folder.parent / "tokenizer"

    @property
    def row(self) -> np.dtype[np.void]:
        """Return the type of the row saved for each document."""
        return np.dtype([("place", "<u8"), ("size", "<u8"), ("keys", "<u8", (self.keys,))])

    def unit(self, number: int, kind: str) -> Path:
        """Return the path of a file of a unit."""
        return self.folder / "units" / f"{number:05}.{kind}"

    def piece(self, shard: int, unit: int, number: int) -> Path:
        """Return the path of a piece."""
        return self.folder / "pieces" / f"{shard:05}" / f"{unit:05}-{number:05}.npz"

    def shard(self, number: int, kind: str) -> Path:
        """Return the path of a file of a finished shard."""
        return self.folder / "shards" / f"{number:05}.{kind}"

    def documents(self, unit: int) -> npt.NDArray[np.void]:
        """Return the rows of a unit's documents, memory-mapped unless there are none."""
        path = self.unit(unit, "documents")
        return np.memmap(path, self.row, "r") if path.stat().st_size else np.empty(0, self.row)

    def facts(self, unit: int) -> UnitFacts | None:
        """Return the findings of the survey in a unit, or None if it is not finished."""
        path = self.unit(unit, "json")
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        found["marks"] = [Mark(*mark) for mark in found["marks"]]
        found["bad"] = [Bad(*bad) for bad in found["bad"]]
        found["lost"] = Lost(*found["lost"])
        facts = UnitFacts(**found)
        whole = self.unit(unit, "documents").stat().st_size == facts.documents * self.row.itemsize
        return facts if whole else None

    def keep_facts(self, unit: int, facts: UnitFacts) -> None:
        """Save the findings of a unit, which marks it as surveyed."""
        with whole(self.unit(unit, "json")) as path:
            path.write_text(json.dumps(asdict(facts)))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; on exit, sync the file and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    yield draft
    sync(draft)
    draft.replace(path)
