"""Turn text into a corpus: look at every document once, build the tokenizer, then tokenize every document.

The folder appears under its name only when it is complete; the same request again finds it and does nothing. A run that
was killed is gone on with by the same request.
"""

import json
import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.data.corpus import (
    MANIFEST,
    HeldOutRecord,
    Manifest,
    SplitRecord,
    TokenizerRecord,
    open_corpus,
    read_manifest,
)
from plumbline.data.heldout import HeldOut, is_near
from plumbline.data.indexed import Int64s
from plumbline.data.preparation.filling import Filled, fill
from plumbline.data.preparation.request import LIBRARIES, Request, key_of
from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.data.tokenizers import tokenizer_sha256
from plumbline.data.workspace import FolderKind, check_replaceable, is_free, resumed_folder

LOG = logging.getLogger(__name__)

SPLITS = ("train", "validation")
CORPUS = FolderKind(
    name="a corpus",
    marks=(MANIFEST,),
    others=(
        *(f"{split}{number}.{ending}" for split in SPLITS for number in ("", "-*") for ending in ("bin", "idx")),
        *(f"tokenizer/{file}" for file in TOKENIZER_FILES),
    ),
)


@dataclass(frozen=True)
class Result:
    """Hold the corpus that there is now."""

    output: Path
    manifest: Manifest
    seconds: float | None
    """Time taken; None if the corpus was there already."""


def prepare(request: Request) -> Result:
    """Make a corpus, unless the same one is there already.

    Raises:
        ValueError: the request cannot be met; nothing was written.
        OSError: the disk is full, and nothing was kept; or a file cannot be read or written, or a process died, and the
            same request goes on from there.
    """
    started = time.monotonic()
    request.check()
    identity = request.identity()
    if _exists_already(request, identity):
        manifest = read_manifest(request.output)
        _warn_of_share(request, manifest, "prepare it again with --overwrite")
        return Result(request.output, manifest, None)

    with resumed_folder(request.output, CORPUS, key_of(identity)) as folder:
        filled = fill(
            request, folder, lambda split, shard: split if request.shard_bytes is None else f"{split}-{shard:05}"
        )
        if request.identity() != identity:
            raise ValueError(
                "the source changed while it was being read; run the same command again when it is at rest"
            )
        manifest = _manifest(request, folder, identity, filled)
        _warn_of_share(request, manifest, "give more text, or another --validation-fraction")
        write_manifest(folder, manifest)
    return Result(request.output, manifest, time.monotonic() - started)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write corpus.json."""
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n")


def _exists_already(request: Request, identity: Mapping[str, Any]) -> bool:
    """Return whether this very corpus is there; an error if something else is in its place."""
    output = request.output
    if request.overwrite or is_free(output) or not (output / MANIFEST).is_file():
        check_replaceable(output, CORPUS)
        return False
    there = read_manifest(output).request
    different = [key for key in {**identity, **there} if there.get(key) != identity.get(key)]
    if different:
        changes = "; ".join(f"{key} was {there.get(key)!r}, now {identity.get(key)!r}" for key in different)
        raise ValueError(
            f"--output {output}: holds another corpus ({changes}); choose another name, or replace it with --overwrite"
        )
    open_corpus(output)  # raises if it is damaged
    return True


def _warn_of_share(request: Request, manifest: Manifest, remedy: str) -> None:
    """Say so if the share of the text that is held out is far from the one that was asked for."""
    sizes = {name: record.source_bytes for name, record in manifest.splits.items()}
    share = sizes["validation"] / sum(sizes.values())
    if not is_near(share, request.validation_fraction):
        LOG.warning(
            f"{share:.1%} of the text is held out, and --validation-fraction asked for "
            f"{request.validation_fraction:.1%}; {remedy}"
        )


def _manifest(request: Request, folder: Path, identity: dict[str, Any], filled: Filled) -> Manifest:
    sharded = request.shard_bytes is not None
    return Manifest(
        format_version=2 if sharded else 1,
        tokenizer=TokenizerRecord(spec=request.tokenizer, sha256=tokenizer_sha256(folder / "tokenizer")),
        vocab_size=filled.encoder.vocab_size,
        eos_token_id=filled.encoder.eos_token_id,
        splits={
            split: SplitRecord(
                **filled.totals.counts[split].model_dump(), shards=filled.totals.shards[split] if sharded else []
            )
            for split in SPLITS
        },
        files=filled.totals.files,
        unigram_entropy=unigram_entropy(*filled.frequencies),
        request=identity,
        skipped=filled.skipped,
        versions=versions(),
        held_out=held_out_record(filled.held_out),
        sources=filled.totals.sources,
        bad_records=filled.bad,
    )


def held_out_record(held_out: HeldOut) -> HeldOutRecord:
    """Return what the manifest says of what is held out."""
    cut_above = None if np.isinf(held_out.cut_above) else held_out.cut_above
    return HeldOutRecord(threshold=f"{held_out.threshold:016x}", cut_above=cut_above)


def versions() -> dict[str, str]:
    """Return the libraries that make a corpus."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def unigram_entropy(train: Int64s, validation: Int64s) -> float:
    """Return nats per validation token under the train token counts, one added to each so that none is impossible.

    Args:
        train: [vocab_size] counts.
        validation: [vocab_size] counts.
    """
    log_probabilities = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation * log_probabilities).sum() / validation.sum())
