"""State what to prepare."""

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plumbline.data.preparation.duplicates import check_mode
from plumbline.data.sources import Listed, Sources
from plumbline.data.tokenizer_making import check_tokenizer, trained_size
from plumbline.data.tokenizers import TOKENIZER, tokenizer_sha256

LIBRARIES = ("numpy", "tokenizers", "sentencepiece", "transformers", "datasets")

WORK_FORMAT = 5
"""Version of the files of work in progress; work of another version is not resumed."""


@dataclass(frozen=True)
class Request:
    """State what to prepare."""

    sources: Sources
    tokenizer: str
    output: Path
    validation_fraction: float = 0.02
    seed: int = 0
    workers: int = 1
    overwrite: bool = False
    shard_bytes: int | None = None
    """Bytes of text per shard, or None for one shard."""
    deduplicate: str | None = None
    """`exact` or `near`, as in duplicates; None keeps every document."""
    skip_bad: bool = False
    """Leave out damaged records instead of ending with an error."""

    def check(self) -> None:
        """Refuse invalid options before anything is read.

        Raises:
            ValueError: names the option and the remedy.
        """
        if not 0 < self.validation_fraction <= 1:
            raise ValueError(
                f"--validation-fraction {self.validation_fraction}: expected a number above 0 and at most 1; 1 "
                "holds out everything"
            )
        if not 0 <= self.seed < 2**64:  # hashes take a 64-bit key
            raise ValueError(f"--seed {self.seed}: expected a whole number from 0 to 2^64 - 1")
        check_workers(self.workers)
        check_mode(self.deduplicate)
        check_tokenizer(self.tokenizer)
        if self.validation_fraction == 1 and trained_size(self.tokenizer):
            raise ValueError(
                f"--tokenizer {self.tokenizer}: trains on text that is not held out, and --validation-fraction 1 "
                "leaves none; give the tokenizer of the model that is to be scored, such as runs/NAME/tokenizer"
            )

    def name_pair(self, split: str, shard: int) -> str:
        """Return the name of a shard's token files without suffixes."""
        return split if self.shard_bytes is None else f"{split}-{shard:05}"

    def identity(self, listed: Listed) -> dict[str, Any]:
        """Return everything that shapes the corpus, such as the content of the files, but not the number of workers.

        Newer options appear only if they are used, so that existing corpora keep their identity.
        """
        identity = {
            "source": self.sources.names,
            "source_fingerprint": listed.fingerprint(),
            **self.sources.reading.options(),
            **tokenizer_identity(self.tokenizer),
            "validation_fraction": self.validation_fraction,
            "seed": self.seed,
        }
        new = {"shard_bytes": self.shard_bytes, "deduplicate": self.deduplicate, "skip_bad": self.skip_bad}
        return identity | {key: value for key, value in new.items() if value}


def check_workers(workers: int) -> None:
    """Refuse a number of processes with which nothing can be done.

    Raises:
        ValueError: names the option and the least.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers}: expected at least 1")


def tokenizer_identity(spec: str) -> dict[str, str | None]:
    """Return the name of a tokenizer, and the hash of its file if it is in a local folder."""
    is_local = (Path(spec) / TOKENIZER).is_file()
    return {"tokenizer": spec, "tokenizer_sha256": tokenizer_sha256(Path(spec)) if is_local else None}


def key_of(identity: dict[str, Any]) -> str:
    """Return a key for the work of a request, which also depends on the versions of the libraries."""
    everything = json.dumps([identity, WORK_FORMAT, {name: version(name) for name in LIBRARIES}], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()[:16]
