"""Make a corpus of token ids that the tools of another trainer made: `--tokens`.

The ids are copied as they are. What a corpus holds besides is computed: where documents begin, checksums, and the bytes
of text, by which losses are compared across tokenizers.
"""

import glob
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from plumbline.data.corpus import read_manifest
from plumbline.data.indexed import IndexedWriter, Int64s
from plumbline.data.inputs.files import state_of
from plumbline.data.manifest import Counts, FileRecord, Manifest, SplitRecord, TokenizerRecord
from plumbline.data.preparation.encoding import Encoded
from plumbline.data.preparation.manifest import CORPUS, finish, unigram_entropy, versions
from plumbline.data.preparation.request import tokenizer_identity
from plumbline.data.preparation.shards import SplitFiles, sum_of
from plumbline.data.preparation.token_files import documents
from plumbline.data.prepare import Result, exists_already
from plumbline.data.progress import Progress
from plumbline.data.tokenizer_making import build_tokenizer, check_tokenizer, trained_size
from plumbline.data.tokenizers import Encoder, TextBytes, tokenizer_sha256
from plumbline.data.workspace import new_folder

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenRequest:
    """State which files of token ids become a corpus."""

    tokens: Sequence[str]
    """Files and globs, to train on."""
    validation_tokens: Sequence[str]
    """Files and globs, held out."""
    tokenizer: str
    """The one that made the ids."""
    output: Path
    overwrite: bool

    def files(self) -> dict[str, list[Path]]:
        """Return the files of each split.

        Raises:
            ValueError: no file matches, or one is named twice.
        """
        named = {"train": ("--tokens", self.tokens), "validation": ("--validation-tokens", self.validation_tokens)}
        found: dict[str, list[Path]] = {}
        seen: set[Path] = set()
        for split, (option, specs) in named.items():
            found[split] = [path for spec in specs for path in _matching(option, spec)]
            for path in found[split]:
                if path.resolve() in seen:
                    raise ValueError(f"{option} {path}: is named twice, and its tokens would be there twice")
                seen.add(path.resolve())
        return found

    def identity(self) -> dict[str, Any]:
        """Return everything that shapes the corpus."""
        digest = xxhash.xxh3_64()
        for path in (path for files in self.files().values() for path in files):
            digest.update(state_of(path))
        return {
            "tokens": list(self.tokens),
            "validation_tokens": list(self.validation_tokens),
            "source_fingerprint": digest.hexdigest(),
            **tokenizer_identity(self.tokenizer),
        }


def _matching(option: str, spec: str) -> list[Path]:
    """Return the files that match, sorted by name."""
    matches = [spec] if Path(spec).is_file() else sorted(set(glob.glob(spec, recursive=True)))  # noqa: PTH207 - absolute
    files = [path for path in map(Path, matches) if path.is_file()]
    if not files:
        raise ValueError(f"{option} {spec}: no file matches; give .bin or .npy files of token ids, or a glob of them")
    return files


def import_tokens(request: TokenRequest) -> Result:
    """Make a corpus of files of token ids, unless the same one exists already.

    Raises:
        ValueError: the request cannot be met; nothing was written.
        OSError: a file cannot be read or written, or the disk is full; nothing was kept.
    """
    started = time.monotonic()
    if trained_size(request.tokenizer):
        raise ValueError(f"--tokenizer {request.tokenizer}: --tokens needs the tokenizer that made the ids")
    check_tokenizer(request.tokenizer)
    identity = request.identity()
    if exists_already(request.output, identity, request.overwrite):
        return Result(request.output, read_manifest(request.output), None)
    with new_folder(request.output, CORPUS) as folder:
        build_tokenizer(request.tokenizer, [], folder / "tokenizer")
        manifest = _fill(request, folder, identity)
        finish(folder, manifest)
    return Result(request.output, manifest, time.monotonic() - started)


def _fill(request: TokenRequest, folder: Path, identity: dict[str, Any]) -> Manifest:
    """Copy the ids of all files, and return what corpus.json says."""
    encoder = Encoder(folder / "tokenizer", request.tokenizer)
    splits: dict[str, SplitRecord] = {}
    files: dict[str, FileRecord] = {}
    frequencies: list[Int64s] = []
    for split, paths in request.files().items():
        counts, written = _copied(folder, split, paths, encoder)
        splits[split] = SplitRecord(**counts.model_dump())
        files.update(written.keep())
        frequencies.append(written.frequencies)
        if not written.frequencies[encoder.eos_token_id]:
            LOG.warning(
                f"{paths[0]}: the end-of-text token {encoder.eos_token_id} does not occur, so all of {split} is one "
                "document"
            )
    return Manifest(
        tokenizer=TokenizerRecord(spec=request.tokenizer, sha256=tokenizer_sha256(folder / "tokenizer")),
        vocab_size=encoder.vocab_size,
        eos_token_id=encoder.eos_token_id,
        begins_with=encoder.begins_with,
        splits=splits,
        files=files,
        unigram_entropy=unigram_entropy(*frequencies),
        request=identity,
        skipped={},
        versions=versions(),
    )


def _copied(folder: Path, split: str, paths: Sequence[Path], encoder: Encoder) -> tuple[Counts, SplitFiles]:
    """Copy the ids of one split."""
    text = TextBytes(folder / "tokenizer")
    counts = Counts(documents=0, tokens=0, source_bytes=0)
    with (
        IndexedWriter(folder / split, encoder.dtype) as writer,
        closing(Progress(f"copying {split}", sum(path.stat().st_size for path in paths))) as progress,
    ):
        written = SplitFiles(folder, writer, encoder.vocab_size)
        for tokens, lengths in documents(paths, encoder.vocab_size, encoder.eos_token_id):
            counts = sum_of(counts, written.add(Encoded(tokens, lengths, text.count(tokens, lengths)), continued=False))
            progress.update(tokens.nbytes)
    if not counts.tokens:
        raise ValueError(f"{', '.join(map(str, paths))}: holds no token id")
    return counts, written
