"""Keep what is done, so that a run that was killed goes on from there: files in a folder beside the corpus to be.

    units/00007.json        what the survey found in one unit, written last
    units/00007.documents   a row for each of its documents: place, bytes, hashes for duplicates
    units/00007.sample      documents of it that a tokenizer may train on
    pieces/00003/00007-00012.npz   tokens of one piece of a unit, for shard 3
    shards/00003.json       what a finished shard holds, written last; shards/00003.npy: its token counts

Every file is written under another name and renamed, so one that is there is whole.
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

from plumbline.data.workspace import sync


class Mark(NamedTuple):
    """Hold where a piece of a unit ends."""

    documents: int
    """Documents of the unit up to here."""
    source_bytes: int
    """Bytes of the piece's text."""
    after: int | None
    """Where reading can go on (records.Record); None where it cannot."""


class Bad(NamedTuple):
    """Hold a record that is no document."""

    where: str
    number: int
    reason: str
    detail: str


class Lost(NamedTuple):
    """Hold what is lost with the files that are left out whole, as they are not UTF-8 or binary."""

    size: int = 0
    """Bytes of all of them."""
    largest: int = 0
    """Bytes of the largest."""
    problem: str = ""
    """Names the largest, and what is wrong with it."""

    def plus(self, other: "Lost") -> "Lost":
        """Return what is lost with the files of both."""
        _, largest, problem = max(self, other, key=lambda lost: lost.largest)
        return Lost(self.size + other.size, largest, problem)


@dataclass(frozen=True)
class UnitFacts:
    """Hold what the survey found in one unit."""

    documents: int
    source_bytes: int
    records: int
    """Lines or rows, whatever is in them."""
    marks: list[Mark]
    skipped: dict[str, int]
    """Records left out, by reason."""
    bad: list[Bad]
    """The first of those that are worth a look."""
    fatal: bool
    """Whether the last of `bad` ends the work."""
    lost: Lost = field(default_factory=Lost)
    cut: int = 0
    """Byte of a long text at which to cut it, if a part of it is held out."""


@dataclass(frozen=True)
class Work:
    """Find the files of the work in progress."""

    folder: Path
    keys: int
    """Hashes for duplicates of each document."""

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the tokenizer, which is part of the corpus."""
        return self.folder.parent / "tokenizer"

    @property
    def row(self) -> np.dtype[np.void]:
        """Return what is kept of each document."""
        return np.dtype([("place", "<u8"), ("size", "<u8"), ("keys", "<u8", (self.keys,))])

    def unit(self, number: int, kind: str) -> Path:
        """Return a file of a unit."""
        return self.folder / "units" / f"{number:05}.{kind}"

    def piece(self, shard: int, unit: int, number: int) -> Path:
        """Return the file of a piece."""
        return self.folder / "pieces" / f"{shard:05}" / f"{unit:05}-{number:05}.npz"

    def shard(self, number: int, kind: str) -> Path:
        """Return a file of a finished shard."""
        return self.folder / "shards" / f"{number:05}.{kind}"

    def documents(self, unit: int) -> npt.NDArray[np.void]:
        """Return the rows of a unit's documents, mapped; a plain array where there are none."""
        path = self.unit(unit, "documents")
        return np.memmap(path, self.row, "r") if path.stat().st_size else np.empty(0, self.row)

    def facts(self, unit: int) -> UnitFacts | None:
        """Return what the survey found in a unit; None if it has not come to its end."""
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
        """Say that a unit is surveyed."""
        with whole(self.unit(unit, "json")) as path:
            path.write_text(json.dumps(asdict(facts)))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a name to write to; afterwards the file is on disk under its own name, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    yield draft
    sync(draft)
    draft.replace(path)
