"""Open a tokenized corpus: a folder made by launcher/prepare.py, or any Megatron-LM `PREFIX.bin`/`PREFIX.idx` pair.

A corpus folder is `train.bin/.idx`, `validation.bin/.idx`, `tokenizer/` and `corpus.json`, the manifest that says what
the others must be. Opening compares sizes only, so it is instant at any size; `verify_checksums` reads every byte.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ValidationError

from plumbline.data.boundaries import documents_within
from plumbline.data.indexed import IndexedTokens, Int64s, file_facts, open_indexed
from plumbline.data.streams import Rows, Window

MANIFEST = "corpus.json"


class FileRecord(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """State what one file of the corpus must be."""

    size: int
    """Size in bytes."""

    xxh3_64: str
    """Checksum, 16 hex digits."""


class SplitRecord(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Hold the counts of one split."""

    documents: int
    """Documents, each ended by one end-of-text token."""

    tokens: int
    """Tokens, end-of-text tokens included."""

    source_bytes: int
    """UTF-8 bytes of source text: the denominator of bits per byte."""


class TokenizerRecord(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """State which tokenizer made the tokens."""

    spec: str
    """The tokenizer that was asked for: byte, train-bpe:N, train-unigram:N, a path, or hf:NAME."""

    sha256: str
    """Hash of tokenizer/tokenizer.json."""


class Manifest(BaseModel, extra="ignore", frozen=True, strict=True, use_attribute_docstrings=True):
    """Hold the contents of corpus.json."""

    format_version: Literal[1] = 1
    """Version of this layout."""

    tokenizer: TokenizerRecord
    """The tokenizer, stored whole in the folder tokenizer/."""

    vocab_size: int
    """Number of token ids, end-of-text included."""

    eos_token_id: int
    """The token that ends each document."""

    splits: dict[str, SplitRecord]
    """train and validation."""

    files: dict[str, FileRecord]
    """Every token file."""

    unigram_entropy: float
    """Nats per token of the validation split under the train split's add-one-smoothed token frequencies: what a
    model that ignores context scores, so what training must beat."""

    request: dict[str, Any]
    """The arguments of the prepare command that shape the corpus, and a fingerprint of the source it read."""

    skipped: dict[str, int]
    """Documents left out, by reason."""

    versions: dict[str, str]
    """Libraries that made it."""


@dataclass(frozen=True)
class Split:
    """Read one stream of tokens in windows: a corpus's training part or its held-out part.

    Window k covers tokens [k*T, k*T + T + 1): T inputs, and the same tokens one later as targets. Neighbours share one
    token, so every token of the stream but the first is a target exactly once.
    """

    name: str
    indexed: IndexedTokens
    source_bytes: int | None
    """UTF-8 bytes of source text; None when unknown (a bare Megatron-LM pair)."""
    has_answers: ClassVar[bool] = False

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, end-of-text tokens included."""
        return len(self.indexed.tokens)

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return self.indexed.num_documents

    def training_windows(self, length: int) -> int:
        """Return the number of windows in which every position has a target; a last shorter one is not counted.

        Raises:
            ValueError: the split is shorter than one.
        """
        windows = max(0, self.num_tokens - 1) // length
        if windows == 0:
            raise ValueError(
                f"{self.indexed.prefix}.bin: {self.num_tokens} tokens are fewer than one sample of "
                f"data.sequence_length {length} (+ 1 for the last target); shorten it or prepare more text"
            )
        return windows

    def evaluation_windows(self, length: int) -> int:
        """Return the number of windows that together make every token but the first a target.

        The last window may be shorter than `length`.

        Raises:
            ValueError: the split has no token to predict.
        """
        windows = -(-max(0, self.num_tokens - 1) // length)
        if windows == 0:
            raise ValueError(
                f"{self.indexed.prefix}.bin: {self.num_tokens} tokens leave nothing to predict; "
                "prepare the corpus with more text or a larger --validation-fraction"
            )
        return windows

    def read(self, number: int, length: int) -> Window:
        """Read window `number`; the last one may be shorter than `length`."""
        start = number * length
        tokens = self.indexed.tokens[start : start + length + 1]
        begins = self.indexed.document_starts(start, start + len(tokens) - 1) - start
        return Window(tokens[:-1], tokens[1:], begins)

    def fill(self, rows: Rows, where: Int64s, numbers: Int64s) -> None:
        """Write windows into rows of a batch."""
        length = rows.length
        starts = numbers * length
        read = [self.indexed.read(start, start + length + 1) for start in starts.tolist()]
        narrow = np.result_type(*{tokens.dtype for tokens in read})  # as on disk: widened for all rows at once
        tokens = np.empty((len(read), length + 1), narrow)
        for row, its in enumerate(read):
            tokens[row, : len(its)] = its
        rows.inputs[where], rows.labels[where] = tokens[:, :-1], tokens[:, 1:]
        for row, its in zip(where.tolist(), read, strict=True):
            if len(its) <= length:
                rows.pad(row, len(its) - 1)
        window, begins = documents_within(self.indexed, starts, np.minimum(starts + length, self.num_tokens - 1))
        rows.begins.append((where * length - starts)[window] + begins)

    def bits_per_byte(self, loss: float) -> float | None:
        """Return the loss in bits x the split's tokens per byte of source text; None when the bytes are unknown."""
        return None if not self.source_bytes else loss / math.log(2) * self.num_tokens / self.source_bytes


@dataclass(frozen=True)
class Corpus:
    """Hold an open corpus; what a bare Megatron-LM pair does not state is None, and its only split is "train"."""

    name: str
    path: Path
    fingerprint: str
    """Identifies the tokens themselves, wherever the files lie: one input of the order of samples."""
    splits: Mapping[str, Split]
    vocab_size: int | None = None
    eos_token_id: int | None = None
    tokenizer_path: Path | None = None
    tokenizer_sha256: str | None = None
    manifest: Manifest | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def held_out(self) -> Split:
        """Return the split to evaluate on: the validation split, or everything where there is none."""
        return self.splits.get("validation", self.splits["train"])


def open_corpus(path: str | Path) -> Corpus:
    """Open a corpus folder, or a bare `PREFIX` (with or without .bin/.idx) of a Megatron-LM pair.

    Raises:
        ValueError: it is missing, truncated or damaged; the message names the file and the remedy.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return _open_folder(path)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
        indexed = open_indexed(prefix)
        fingerprint = _fingerprint({"idx": file_facts(Path(f"{prefix}.idx")).xxh3_64})
        return Corpus(prefix.name, prefix, fingerprint, {"train": Split("train", indexed, None)})
    known = ", ".join(sorted(str(manifest.parent) for manifest in path.parent.glob(f"*/{MANIFEST}"))) or "none"
    raise ValueError(
        f"{path}: no corpus here (no {path / MANIFEST}, no {prefix}.idx); corpora beside it: {known}. "
        f"Make one with: python launcher/prepare.py --source PATH --tokenizer train-bpe:8192 --output {path}"
    )


def _open_folder(path: Path) -> Corpus:
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != record.size:
            state = "is missing" if actual is None else f"has {actual} bytes"
            raise ValueError(
                f"{file}: {state}, {MANIFEST} expects {record.size} bytes; copy the corpus again, "
                "or prepare it again with --overwrite"
            )
    splits = {}
    for name, counts in manifest.splits.items():
        split = Split(name, open_indexed(path / name), counts.source_bytes)
        for quantity, actual, expected in (
            ("tokens", split.num_tokens, counts.tokens),
            ("documents", split.num_documents, counts.documents),
        ):
            if actual != expected:
                raise ValueError(
                    f"{path / name}.idx: {actual} {quantity}, {MANIFEST} expects {expected}; "
                    "prepare the corpus again with --overwrite"
                )
        splits[name] = split
    return Corpus(
        name=path.resolve().name,
        path=path,
        fingerprint=_fingerprint({name: record.xxh3_64 for name, record in manifest.files.items()}),
        splits=splits,
        vocab_size=manifest.vocab_size,
        eos_token_id=manifest.eos_token_id,
        tokenizer_path=path / "tokenizer",
        tokenizer_sha256=manifest.tokenizer.sha256,
        manifest=manifest,
    )


def read_manifest(folder: Path) -> Manifest:
    """Parse corpus.json.

    Raises:
        ValueError: not JSON, or a fact is missing or of the wrong type.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: {where}: {first['msg']}; prepare the corpus again with --overwrite") from error


def verify_checksums(corpus: Corpus) -> None:
    """Read every token file of a corpus folder and compare checksums; a bare Megatron-LM pair has none to compare.

    Raises:
        ValueError: a file differs from what was written.
    """
    for name, record in corpus.manifest.files.items() if corpus.manifest else ():
        actual = file_facts(corpus.path / name).xxh3_64
        if actual != record.xxh3_64:
            raise ValueError(
                f"{corpus.path / name}: checksum {actual}, {MANIFEST} expects {record.xxh3_64}; the file is damaged: "
                "copy the corpus again, or prepare it again with --overwrite"
            )


def _fingerprint(checksums: Mapping[str, str]) -> str:
    """Return sixteen hex digits made from the checksums of a corpus's files."""
    lines = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return xxhash.xxh3_64_hexdigest(lines.encode())
