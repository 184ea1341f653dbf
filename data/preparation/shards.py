"""Assemble pieces into shards: a `.bin`/`.idx` pair for each split, and its counts."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.data.disk import sync
from plumbline.data.indexed import IndexedWriter, Int64s
from plumbline.data.manifest import Counts, FileRecord
from plumbline.data.preparation.encoding import SPLITS, Encoded, read_piece
from plumbline.data.preparation.pieces import Piece
from plumbline.data.preparation.work import Work, whole
from plumbline.data.tokenizers import Encoder


@dataclass
class Totals:
    """Count the contents of one or several shards."""

    counts: dict[str, Counts] = field(default_factory=dict)
    """Counts of each split."""
    sources: dict[str, dict[str, Counts]] = field(default_factory=dict)
    """Counts of each split, by source."""
    pairs: dict[str, list[str]] = field(default_factory=dict)
    """Names of the pairs of each split, in order."""
    files: dict[str, FileRecord] = field(default_factory=dict)

    def count(self, split: str, source: str, counts: Counts) -> None:
        """Add counts of one source."""
        self.counts[split] = sum_of(self.counts.get(split), counts)
        of_source = self.sources.setdefault(source, {})
        of_source[split] = sum_of(of_source.get(split), counts)

    def add(self, other: "Totals") -> None:
        """Add the totals of the next shards."""
        for source, splits in other.sources.items():
            for split, counts in splits.items():
                self.count(split, source, counts)
        for split, names in other.pairs.items():
            self.pairs.setdefault(split, []).extend(names)
        self.files.update(other.files)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return {
            "sources": {
                source: {split: counts.model_dump() for split, counts in splits.items()}
                for source, splits in self.sources.items()
            },
            "pairs": self.pairs,
            "files": {name: record.model_dump() for name, record in self.files.items()},
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Totals":
        """Return the totals given by plain values."""
        totals = cls(
            pairs=found["pairs"], files={name: FileRecord(**record) for name, record in found["files"].items()}
        )
        for source, splits in found["sources"].items():
            for split, counts in splits.items():
                totals.count(split, source, Counts(**counts))
        return totals


def sum_of(first: Counts | None, second: Counts) -> Counts:
    """Add two counts; None stands for zero."""
    if first is None:
        return second
    return Counts(
        documents=first.documents + second.documents,
        tokens=first.tokens + second.tokens,
        source_bytes=first.source_bytes + second.source_bytes,
    )


class SplitFiles:
    """Write the pair of files of one split, and count its tokens."""

    def __init__(self, folder: Path, writer: IndexedWriter, vocab_size: int) -> None:
        self.frequencies = np.zeros(vocab_size, np.int64)
        self._folder = folder
        self._writer = writer

    def add(self, part: Encoded, continued: bool) -> Counts:
        """Write the documents of a piece, the first of which may continue that of the piece before; count them."""
        before = self._writer.num_documents
        self._writer.add_documents(part.tokens, part.lengths.tolist(), continued)
        self.frequencies += np.bincount(part.tokens, minlength=len(self.frequencies))
        documents = self._writer.num_documents - before
        return Counts(documents=documents, tokens=len(part.tokens), source_bytes=part.source_bytes)

    def keep(self) -> dict[str, FileRecord]:
        """Flush the finished files to disk, or remove them if they hold no document; return those that stay."""
        paths = [self._folder / name for name in self._writer.files]
        if not self._writer.num_documents:
            for path in paths:
                path.unlink()
            return {}
        for path in paths:
            sync(path)  # since the pieces it was made from are removed
        return {name: FileRecord(**asdict(facts)) for name, facts in self._writer.files.items()}


def write_shard(
    folder: Path, work: Work, encoder: Encoder, shard: int, names: dict[str, str], pieces: Iterable[tuple[Piece, str]]
) -> None:
    """Write one shard from its pieces as they arrive, and save its totals.

    Args:
        folder: Where the token files go.
        work: Where the pieces are.
        encoder: Gives the type of the tokens.
        shard: The number of the shard.
        names: The name of each split's pair; a pair without documents is not written.
        pieces: The pieces in order, each with the name of its source.
    """
    totals = Totals()
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(folder / names[split], encoder.dtype)) for split in SPLITS]
        splits = [SplitFiles(folder, writer, encoder.vocab_size) for writer in writers]
        for piece, source in pieces:
            continued = piece.long is not None and piece.long.number > 0
            parts = read_piece(work.piece(shard, piece.unit, piece.number))
            for split, files, part in zip(SPLITS, splits, parts, strict=True):
                if len(part.lengths):
                    totals.count(split, source, files.add(part, continued))
    for split, files in zip(SPLITS, splits, strict=True):
        if kept := files.keep():
            totals.pairs[split] = [names[split]]
            totals.files.update(kept)
    _finish_shard(work, shard, totals, np.stack([files.frequencies for files in splits]))


def _finish_shard(work: Work, shard: int, totals: Totals, frequencies: Int64s) -> None:
    """Save what `finished_shard` returns, which marks the shard as finished."""
    with whole(work.shard(shard, "npy")) as path, path.open("wb") as file:
        np.save(file, frequencies)
    with whole(work.shard(shard, "json")) as path:
        path.write_text(json.dumps(totals.to_json()))


def finished_shard(folder: Path, work: Work, shard: int) -> tuple[Totals, Int64s] | None:
    """Return the totals of a shard and its token counts [splits, vocab_size], or None if it is not finished."""
    path = work.shard(shard, "json")
    if not path.is_file():
        return None
    totals = Totals.from_json(json.loads(path.read_text()))
    for name, record in totals.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != record.size:
            return None
    frequencies: Int64s = np.load(work.shard(shard, "npy"))
    return totals, frequencies
