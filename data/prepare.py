"""Turn text into a corpus: survey every document, build the tokenizer, then tokenize every document.

The folder appears under its name only when it is complete; repeating the request then does nothing. The same request
continues a run that was killed.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.heldout import is_near
from plumbline.data.manifest import MANIFEST, Manifest, SplitRecord, TokenizerRecord
from plumbline.data.preparation.encoding import CHANGED, SPLITS
from plumbline.data.preparation.filling import Filled, fill
from plumbline.data.preparation.manifest import (
    CORPUS,
    check_same,
    finish,
    finished,
    held_out_record,
    unigram_entropy,
    versions,
)
from plumbline.data.preparation.request import Request as Request
from plumbline.data.preparation.request import key_of
from plumbline.data.sources import Listed
from plumbline.data.tokenizers import tokenizer_sha256
from plumbline.data.workspace import check_replaceable, is_free, resumed_folder

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Hold the finished corpus."""

    output: Path | str
    """The folder, or the URL."""
    manifest: Manifest
    seconds: float | None
    """Time taken, or None if the corpus existed already."""


def prepare(request: Request) -> Result:
    """Make a corpus, unless the same one exists already.

    Raises:
        ValueError: the request cannot be met; nothing was written.
        OSError: the disk is full, and nothing was kept; or a file cannot be read or written, or a process died, and the
            same request continues from there.
    """
    started = time.monotonic()
    request.check()
    listed = request.sources.listed()
    identity = request.identity(listed)
    if exists_already(request.output, identity, request.overwrite):
        manifest = read_manifest(request.output)
        warn_of_share(manifest, request.validation_fraction, "prepare it again with --overwrite")
        return Result(request.output, manifest, None)

    with resumed_folder(request.output, CORPUS, key_of(identity)) as folder:
        manifest = finished(folder) or _fill(request, folder, listed, identity)
        warn_of_share(manifest, request.validation_fraction, "give more text, or another --validation-fraction")
        exists_already(request.output, identity, request.overwrite)  # raises if another process made another meanwhile
    return Result(request.output, manifest, time.monotonic() - started)


def exists_already(output: Path, wanted: Mapping[str, Any], overwrite: bool) -> bool:
    """Return whether the corpus of this request exists; refuse anything else in its place.

    Raises:
        ValueError: something else is there; the message names it.
    """
    if overwrite or is_free(output) or not (output / MANIFEST).is_file():
        check_replaceable(output, CORPUS)
        return False
    check_same(output, read_manifest(output).request, wanted)
    open_corpus(output)  # raises if it is damaged
    return True


def warn_of_share(manifest: Manifest, fraction: float, remedy: str) -> None:
    """Warn if the held-out share of the text is far from `fraction`, which was requested."""
    sizes = {name: record.source_bytes for name, record in manifest.splits.items()}
    share = sizes["validation"] / sum(sizes.values())
    if not is_near(share, fraction):
        LOG.warning(
            f"{share:.1%} of the text is held out, and --validation-fraction asked for {fraction:.1%}; {remedy}"
        )


def _fill(request: Request, folder: Path, listed: Listed, identity: dict[str, Any]) -> Manifest:
    """Fill a folder and return its manifest."""
    filled = fill(request, listed, folder, request.name_pair)
    if request.identity(request.sources.listed()) != identity:
        raise ValueError(CHANGED)
    manifest = _manifest(request, folder, listed, identity, filled)
    finish(folder, manifest)
    return manifest


def _manifest(request: Request, folder: Path, listed: Listed, identity: dict[str, Any], filled: Filled) -> Manifest:
    totals, sharded = filled.totals, request.shard_bytes is not None
    return Manifest(
        format_version=2 if sharded else 1,
        tokenizer=TokenizerRecord(spec=request.tokenizer, sha256=tokenizer_sha256(folder / "tokenizer")),
        vocab_size=filled.encoder.vocab_size,
        eos_token_id=filled.encoder.eos_token_id,
        begins_with=filled.encoder.begins_with,
        splits={
            split: SplitRecord(**totals.counts[split].model_dump(), shards=totals.pairs[split] if sharded else [])
            for split in SPLITS
            if split in totals.counts  # nothing trains where everything is held out
        },
        files=totals.files,
        unigram_entropy=unigram_entropy(*filled.frequencies),
        request=identity,
        source_files=list(listed.file_keys()),
        skipped=filled.skipped,
        versions=versions(),
        held_out=held_out_record(filled.held_out),
        sources=totals.sources,
        bad_records=filled.bad,
    )
