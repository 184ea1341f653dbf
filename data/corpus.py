"""Open a tokenized corpus: a folder made by launcher/prepare.py, or any Megatron-LM `PREFIX.bin`/`PREFIX.idx` pairs.

A corpus folder is `train.bin/.idx`, `validation.bin/.idx`, `tokenizer/` and `corpus.json`, the manifest that states
sizes and checksums of the other files; a split may have several pairs. Opening a folder compares sizes and reads no
token; preparation/verifying.py reads every byte. Bare pairs have no manifest, so their indices are read whole. A folder
at a URL is read through a cache, and each part of it is checked when it arrives (remote/).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash
from pydantic import ValidationError

from plumbline.data.damage import in_words
from plumbline.data.folders import CorpusFolder, LocalFolder, ShardFacts
from plumbline.data.indexed import FileFacts, Int64s, count_documents, token_dtype
from plumbline.data.manifest import MANIFEST, Manifest, parse_without_blocks
from plumbline.data.missing import NoCorpusError
from plumbline.data.pairs import NoPairError, find_pairs, open_pairs
from plumbline.data.paths import is_url
from plumbline.data.remote.cache import Cache, CacheConfig
from plumbline.data.remote.fetch import RefusedError
from plumbline.data.remote.folder import RemoteFolder
from plumbline.data.remote.piece import Piece
from plumbline.data.shards import Shards, Tokens, remote_pieces_of
from plumbline.data.streams import Rows, Window
from plumbline.data.workspace import restore

CorpusPath = str | Path | Sequence[str]
"""A corpus folder, or pairs: a prefix, a folder, a glob, or a list of these; or the URL of any of them."""


@dataclass(frozen=True)
class Split:
    """Read one split of a corpus, training or held-out, as windows of tokens.

    Window k covers tokens [k*T, k*T + T + 1): T inputs, and the same tokens one later as targets. Neighbours share one
    token, so every token of the stream but the first is a target exactly once.
    """

    name: str
    indexed: Tokens
    source_bytes: int | None
    """UTF-8 bytes of source text, or None if unknown (a bare Megatron-LM pair)."""
    has_answers: ClassVar[bool] = False

    def __str__(self) -> str:
        return str(self.indexed)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, end-of-text tokens included."""
        return len(self.indexed)

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
                f"{self.indexed}: {self.num_tokens} tokens are fewer than one sample of "
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
                f"{self.indexed}: {self.num_tokens} tokens leave nothing to predict; "
                "prepare the corpus with more text or a larger --validation-fraction"
            )
        return windows

    def read(self, number: int, length: int) -> Window:
        """Read window `number`; the last one may be shorter than `length`."""
        start = number * length
        tokens = self.indexed.read(start, start + length + 1)
        begins = self.indexed.document_starts(start, start + len(tokens) - 1) - start
        return Window(tokens[:-1], tokens[1:], begins)

    def remote_pieces(self, number: int, length: int) -> list[Piece]:
        """Return the pieces to fetch before window `number` can be read, in order; none for a local corpus."""
        return remote_pieces_of(self.indexed, number * length, number * length + length + 1)

    def fill(self, rows: Rows, where: Int64s, numbers: Int64s) -> None:
        """Write windows into rows of a batch."""
        length = rows.length
        starts = numbers * length
        lasts = np.minimum(starts + length, self.num_tokens - 1)
        tokens = self.indexed.read_all(starts, lasts - starts + 1)
        if len(tokens) == len(numbers) * (length + 1):
            table = tokens.reshape(len(numbers), length + 1)  # in the dtype on disk: widened for all rows at once
            rows.inputs[where], rows.labels[where] = table[:, :-1], table[:, 1:]
        else:  # a window at the end of the split is shorter
            stops = np.cumsum(lasts - starts + 1).tolist()
            for row, start, stop in zip(where.tolist(), [0, *stops], stops, strict=False):
                rows.put(row, Window(tokens[start : stop - 1], tokens[start + 1 : stop], begins=np.empty(0, np.int64)))
        window, begins = self.indexed.documents_within(starts, lasts)
        rows.begins.append((where * length - starts)[window] + begins)

    def bits_per_byte(self, loss: float) -> float | None:
        """Return the loss in bits per byte of source text, or None if the bytes are unknown."""
        return None if not self.source_bytes else loss / math.log(2) * self.num_tokens / self.source_bytes


@dataclass(frozen=True)
class Corpus:
    """Hold an open corpus; for bare Megatron-LM pairs, unknown facts are None and the only split is "train"."""

    name: str
    path: Path | str
    """Where it was opened."""
    fingerprint: str
    """Identifies the tokens, wherever the files lie; one of the inputs to the order of samples."""
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
        return self.splits.get("validation") or self.splits["train"]

    def check_sizes(self) -> None:
        """Compare the sizes of all files with those in the manifest; of a corpus without, or at a URL, nothing.

        Raises:
            UnlikeManifestError: a file is missing, or has another size.
        """
        if self.manifest is not None:
            _check_sizes(folder_at(self.path).within(self.manifest.folder), self.manifest)


def open_corpus(path: CorpusPath, cache: CacheConfig | None = None, check_sizes: bool = True) -> Corpus:
    """Open a corpus folder, or bare pairs of Megatron-LM as one.

    A prefix (with or without .bin/.idx) opens one pair. A folder without corpus.json, a glob or a list opens all pairs
    that it contains, sorted by path.

    Args:
        path: where it is, on this machine or at a URL.
        cache: where parts of a corpus at a URL are kept.
        check_sizes: whether to compare the sizes of all files now, rather than of each pair when it is first read.

    Raises:
        NoCorpusError: it is missing.
        ValueError: it is truncated or damaged; the message names the file and the remedy.
        OSError: it is at a URL and cannot be fetched.
    """
    refused: RefusedError | None = None
    if isinstance(path, str | Path):
        folder = folder_at(path, cache)
        try:
            is_corpus = folder.has(MANIFEST)
        except RefusedError as error:  # it is missing if there are pairs instead
            is_corpus, refused = False, error
        if is_corpus:
            return _open_folder(folder, check_sizes)
    try:
        prefixes = find_pairs([str(path)] if isinstance(path, str | Path) else path)
    except (ValueError, RefusedError) as error:
        if refused is not None:
            raise refused from None
        if isinstance(error, NoPairError) and isinstance(path, str | Path) and not is_url(path):
            raise NoCorpusError(Path(path), _no_corpus(Path(path))) from error
        raise
    tokens, facts = open_pairs(prefixes, Cache(cache or CacheConfig()))
    if len(prefixes) == 1:
        name, fingerprint = prefixes[0].rpartition("/")[2], _fingerprint({"idx": facts[0]})
        return Corpus(name, _as_path(prefixes[0]), fingerprint, {"train": Split("train", tokens, None)})
    name = prefixes[0].rpartition("/")[0].rpartition("/")[2]
    fingerprint = xxhash.xxh3_64_hexdigest("\n".join(facts).encode())
    where = str(path) if isinstance(path, str | Path) else f"{prefixes[0]} and {len(prefixes) - 1:,} more"
    return Corpus(name, where, fingerprint, {"train": Split("train", tokens, None)})


def _as_path(path: str) -> Path | str:
    return path if is_url(path) else Path(path)


def folder_at(path: str | Path, cache: CacheConfig | None = None) -> CorpusFolder:
    """Return a reader for a folder on this machine or at a URL, whatever is in it.

    Raises:
        ValueError: the URL holds a password.
    """
    if is_url(path):
        return RemoteFolder(str(path), Cache(cache or CacheConfig()))
    restore(Path(path))
    return LocalFolder(Path(path))


def _no_corpus(path: Path) -> str:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return f"{path}: no corpus here (no {path / MANIFEST}, no {prefix}.idx); {corpora_beside(path)}"


def corpora_beside(path: Path) -> str:
    """Return a hint that names the corpora beside a path, which may be mistyped."""
    known = sorted(str(manifest.parent) for manifest in path.parent.glob(f"*/{MANIFEST}"))
    return f"corpora beside it: {', '.join(known) or 'none'}"


def _open_folder(folder: CorpusFolder, check_sizes: bool) -> Corpus:
    local = isinstance(folder, LocalFolder)  # of which no block is checked when it is read
    manifest = _parse_manifest(folder, parse_without_blocks if local else Manifest.model_validate_json)
    files = {name: FileFacts(record.size, record.xxh3_64, record.blocks) for name, record in manifest.files.items()}
    outer, folder = folder, folder.within(manifest.folder)
    if check_sizes:
        _check_sizes(folder, manifest)
    splits = {}
    for name, counts in manifest.splits.items():
        split = Split(name, _tokens(folder, name, manifest, files), counts.source_bytes)
        for quantity, actual, expected in (
            ("tokens", split.num_tokens, counts.tokens),
            ("documents", split.num_documents, counts.documents),
        ):
            if actual != expected:
                where = split.indexed if counts.shards else folder / f"{name}.idx"
                raise ValueError(
                    f"{where}: {actual} {quantity}, {MANIFEST} expects {expected}; "
                    "prepare the corpus again with --overwrite"
                )
        splits[name] = split
    return Corpus(
        name=outer.name,
        path=outer.path,
        fingerprint=fingerprint_of(manifest),
        splits=splits,
        vocab_size=manifest.vocab_size,
        eos_token_id=manifest.eos_token_id,
        tokenizer_path=folder.tokenizer(manifest.tokenizer.sha256),
        tokenizer_sha256=manifest.tokenizer.sha256,
        manifest=manifest,
    )


def _check_sizes(folder: CorpusFolder, manifest: Manifest) -> None:
    folder.check_sizes({name: record.size for name, record in manifest.files.items()}, MANIFEST)


def _tokens(folder: CorpusFolder, name: str, manifest: Manifest, files: Mapping[str, FileFacts]) -> Tokens:
    """Return the tokens of one split."""
    counts = manifest.splits[name]
    prefixes = counts.shards or [name]
    itemsize = token_dtype(manifest.vocab_size).itemsize
    shards = [_shard_facts(folder, prefix, files, itemsize) for prefix in prefixes]
    tokens, index_bytes = sum(shard.tokens for shard in shards), sum(shard.idx_file.size for shard in shards)
    documents = count_documents(index_bytes, len(shards), tokens, counts.documents)
    if len(shards) == 1:
        return folder.open_shard(replace(shards[0], documents=documents))
    return Shards(
        f"{folder / prefixes[0]}.bin and {len(shards) - 1:,} more",
        [shard.tokens for shard in shards],
        documents,
        lambda number: folder.open_shard(shards[number]),
    )


def _shard_facts(folder: CorpusFolder, prefix: str, files: Mapping[str, FileFacts], itemsize: int) -> ShardFacts:
    """Return what the manifest says about one pair."""
    missing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if name not in files]
    if missing:
        raise ValueError(
            f"{folder / MANIFEST}: no size and checksum of {', '.join(missing)}; "
            "prepare the corpus again with --overwrite"
        )
    bin_file, idx_file = files[f"{prefix}.bin"], files[f"{prefix}.idx"]
    return ShardFacts(prefix, itemsize, None, bin_file, idx_file)


def read_manifest(path: str | Path, cache: CacheConfig | None = None) -> Manifest:
    """Parse corpus.json of a folder on this machine or at a URL.

    Raises:
        OSError: there is none.
        ValueError: not JSON, or a fact is missing or of the wrong type.
    """
    return _parse_manifest(folder_at(path, cache), Manifest.model_validate_json)


def _parse_manifest(folder: CorpusFolder, parse: Callable[[bytes], Manifest]) -> Manifest:
    data = folder.read(MANIFEST)
    try:
        return parse(data)
    except (ValueError, RecursionError) as error:
        folder.forget(MANIFEST)
        where, problem = "the file", f"Invalid JSON: {in_words(error)}"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where, problem = ".".join(map(str, first["loc"])) or where, first["msg"]
        raise ValueError(
            f"{folder / MANIFEST}: {where}: {problem}; prepare the corpus again with --overwrite"
        ) from error


def fingerprint_of(manifest: Manifest) -> str:
    """Return the fingerprint of the tokens in a manifest's splits."""
    files = manifest.files
    if not any(len(counts.shards) > 1 for counts in manifest.splits.values()):
        return _fingerprint({name: record.xxh3_64 for name, record in files.items()})
    lines = [
        f"{split} {files[f'{prefix}.bin'].xxh3_64} {files[f'{prefix}.idx'].xxh3_64}"
        for split in sorted(manifest.splits)
        for prefix in manifest.splits[split].shards or [split]
    ]
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def _fingerprint(checksums: Mapping[str, str]) -> str:
    """Return sixteen hex digits that hash the checksums of a corpus's files."""
    lines = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return xxhash.xxh3_64_hexdigest(lines.encode())
