"""Tokenize pieces, each into its own file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plumbline.data.heldout import HeldOut
from plumbline.data.indexed import Int64s, Integers
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import Unit, read_records
from plumbline.data.preparation.long_text import PART_BYTES, parts, read_part
from plumbline.data.preparation.pieces import Piece
from plumbline.data.preparation.work import Work, whole
from plumbline.data.tokenizers import Encoder

SPLITS = ("train", "validation")
CHANGED = "the source changed while it was being read; run the same command again when it is at rest"


@dataclass(frozen=True)
class EncodingJob:
    """Hold the settings shared by the tokenization of all pieces."""

    reading: Reading
    work: Work
    tokenizer: str
    held_out: HeldOut


class Texts:
    """Read the documents of consecutive pieces of one unit, each exactly once."""

    def __init__(self, reading: Reading, unit: Unit, piece: Piece) -> None:
        """Start at the position from which `piece` can be read."""
        records = read_records(reading, unit, piece.at)
        self._texts = (record.text for record in records if record.text is not None)
        self._index = piece.first_at

    def of(self, piece: Piece) -> Iterator[str]:
        """Yield the documents of a piece; pieces must be requested in order.

        Raises:
            ValueError: there are fewer documents than the survey found.
        """
        while self._index < piece.last:
            text = next(self._texts, None)
            if text is None:
                raise ValueError(CHANGED)
            self._index += 1
            if self._index > piece.first:
                yield text


def encode_unit(job: EncodingJob, unit: Unit, pieces: list[tuple[Piece, Any]]) -> None:
    """Tokenize pieces of one unit that are read from the same position.

    Args:
        job: The shared settings.
        unit: What to read.
        pieces: The pieces, each with flags for which of its documents are part of the corpus.
    """
    texts = Texts(job.reading, unit, pieces[0][0])
    for piece, kept in pieces:
        encode_texts(job, piece, kept, texts.of(piece))


def encode_texts(job: EncodingJob, piece: Piece, kept: Any, texts: Iterable[str]) -> None:
    """Tokenize the documents of a piece.

    Args:
        job: The shared settings.
        piece: The piece.
        kept: [documents] flags: whether each document is part of the corpus.
        texts: Its documents.

    Raises:
        ValueError: the source has changed.
    """
    encoder = _encoder(job.work.tokenizer, job.tokenizer)
    found = _Encoded(encoder)
    rows = job.work.documents(piece.unit)[piece.first : piece.last]
    for text, row, keep in zip(texts, rows, kept, strict=True):
        size = len(text.encode())
        if size != row["size"]:
            raise ValueError(CHANGED)
        if keep:
            for document in job.held_out.split(text, size, int(row["place"])):
                tokens = list(encode_document(encoder, document.text, document.source_bytes))
                found.add(document.held_out, document.source_bytes, tokens)
    found.save(job.work.piece(piece.shard, piece.unit, piece.number))


def encode_long_part(job: EncodingJob, unit: Unit, piece: Piece) -> None:
    """Tokenize one part of a document that is a whole file."""
    encoder = _encoder(job.work.tokenizer, job.tokenizer)
    found = _Encoded(encoder)
    if piece.long:
        begin, end, number, held_out = piece.long
        data = read_part(Path(unit.names[0]), begin, end, number)
        found.add(held_out, len(data), [encoder.encode(data.decode(), piece.long.begins, piece.long.ends)])
    found.save(job.work.piece(piece.shard, piece.unit, piece.number))


def encode_document(encoder: Encoder, text: str, size: int) -> Iterator[Integers]:
    """Yield the tokens of a document of `size` bytes part by part, with its beginning and end-of-text tokens."""
    if size <= PART_BYTES:
        yield encoder.encode(text)
        return
    first, *middle, last = parts(text.encode())
    yield encoder.encode(first.decode(), ends=False)
    for part in middle:
        yield encoder.encode(part.decode(), begins=False, ends=False)
    yield encoder.encode(last.decode(), begins=False)


class Encoded(NamedTuple):
    """Hold the tokens of one split in a piece."""

    tokens: Integers
    """[sum of lengths]: the documents concatenated, each with its end-of-text token."""
    lengths: Int64s
    source_bytes: int


def read_piece(path: Path) -> tuple[Encoded, Encoded]:
    """Read the tokens of a piece for training and validation."""
    with np.load(path) as found:
        train, validation = (
            Encoded(found[f"{split}_tokens"], found[f"{split}_lengths"], int(found[f"{split}_bytes"]))
            for split in SPLITS
        )
    return train, validation


class _Encoded:
    """Collect the tokens of a piece."""

    def __init__(self, encoder: Encoder) -> None:
        self._tokens: tuple[list[Integers], list[Integers]] = (
            [np.empty(0, encoder.dtype)],
            [np.empty(0, encoder.dtype)],
        )
        self._lengths: tuple[list[int], list[int]] = ([], [])
        self._bytes = [0, 0]

    def add(self, held_out: bool, source_bytes: int, tokens: list[Integers]) -> None:
        self._tokens[held_out].extend(tokens)
        self._lengths[held_out].append(sum(map(len, tokens)))
        self._bytes[held_out] += source_bytes

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {}
        for held_out, split in enumerate(SPLITS):
            arrays[f"{split}_tokens"] = np.concatenate(self._tokens[held_out])
            arrays[f"{split}_lengths"] = np.array(self._lengths[held_out], np.int64)
            arrays[f"{split}_bytes"] = np.int64(self._bytes[held_out])
        with whole(path) as draft, draft.open("wb") as file:
            np.savez(file, **arrays)


_encoder = lru_cache(maxsize=1)(Encoder)  # one per process, loaded once
