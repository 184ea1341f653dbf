"""Define what a corpus folder contains, and write its corpus.json."""

import json
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.data.corpus import read_manifest
from plumbline.data.heldout import HeldOut
from plumbline.data.indexed import Int64s
from plumbline.data.manifest import MANIFEST, HeldOutRecord, Manifest
from plumbline.data.preparation.encoding import SPLITS
from plumbline.data.preparation.request import LIBRARIES
from plumbline.data.preparation.work import whole
from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.data.workspace import FolderKind

WORK = ".work"
"""The folder for work in progress, inside that of the future corpus."""
OPTION_OF = {
    "source": "--source",
    "tokenizer": "--tokenizer",
    "text_key": "--text-key",
    "text_template": "--text-template",
    "document_separator": "--document-separator",
    "validation_fraction": "--validation-fraction",
    "seed": "--seed",
    "shard_bytes": "--shard-size",
    "deduplicate": "--deduplicate",
    "skip_bad": "--on-bad-record skip",
}
"""The options of prepare.py behind the keys of a request."""
IMPLIED = {"source_fingerprint": "source", "tokenizer_sha256": "tokenizer"}
"""Keys of a request that say nothing more where another one differs."""
_FILES = (
    *(f"{split}{number}.{ending}" for split in SPLITS for number in ("", "-*") for ending in ("bin", "idx")),
    *(f"tokenizer/{file}" for file in TOKENIZER_FILES),
)
CORPUS = FolderKind(name="a corpus", marks=(MANIFEST,), others=(*_FILES, *(f"generation-*/{file}" for file in _FILES)))


def finish(folder: Path, manifest: Manifest) -> None:
    """Write corpus.json, which marks the corpus as complete, and remove the work folder."""
    with whole(folder / MANIFEST) as path:
        path.write_text(json.dumps(manifest.model_dump(), indent=2) + "\n")
    shutil.rmtree(folder / WORK, ignore_errors=True)


def finished(folder: Path) -> Manifest | None:
    """Return the manifest of a folder that an earlier run finished but did not publish, or None if unfinished."""
    if not (folder / MANIFEST).is_file():
        return None
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return read_manifest(folder)


def check_same(output: object, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse an output that holds a different corpus from the one wanted.

    Raises:
        ValueError: names every difference between the requests, and the remedy.
    """
    different = [key for key in {**wanted, **there} if there.get(key) != wanted.get(key)]
    if different == ["appended"]:
        raise ValueError(
            f"--output {output}: holds this corpus, and what was added to it by --append, {len(there['appended'])} "
            "time(s); choose another name for one without"
        )
    if different == ["source_fingerprint"]:
        raise ValueError(
            f"--output {output}: holds a corpus of these sources as they were: files have come, gone, or have another "
            "size or time since; choose another name, or replace it with --overwrite"
        )
    if different:
        changes = "; ".join(
            f"{OPTION_OF.get(key, key)} was {_given(there.get(key))}, now {_given(wanted.get(key))}"
            for key in different
            if IMPLIED.get(key) not in different
        )
        raise ValueError(
            f"--output {output}: holds another corpus ({changes}); choose another name, or replace it with --overwrite"
        )


def _given(value: object) -> str:
    return "not given" if value is None else repr(value)


def pairs_of(manifest: Manifest, split: str) -> list[str]:
    """Return the names of a split's token files without suffixes, in order; empty if there is no such split."""
    record = manifest.splits.get(split)
    return [] if record is None else record.shards or [split]


def held_out_record(held_out: HeldOut) -> HeldOutRecord:
    """Return the manifest's record of what is held out."""
    cut_above = None if np.isinf(held_out.cut_above) else held_out.cut_above
    return HeldOutRecord(threshold=f"{held_out.threshold:016x}", cut_above=cut_above)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that make a corpus."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def unigram_entropy(train: Int64s, validation: Int64s) -> float:
    """Return nats per validation token under the add-one-smoothed token frequencies of the train split.

    Args:
        train: [vocab_size] counts.
        validation: [vocab_size] counts.
    """
    log_probabilities = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation * log_probabilities).sum() / validation.sum())
