"""Turn text into a corpus: look at every document once, build the tokenizer, then encode every document.

    sources -> survey (count, split, sample) -> tokenizer -> encode on all cores -> train / validation -> corpus.json

The folder appears under its name only when it is complete; the same request again finds it and does nothing.
"""

import json
import logging
import math
import platform
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.data.corpus import (
    MANIFEST,
    FileRecord,
    Manifest,
    SplitRecord,
    TokenizerRecord,
    open_corpus,
    read_manifest,
)
from plumbline.data.encoding import encode_documents
from plumbline.data.heldout import Survey, is_near, split, survey
from plumbline.data.indexed import IndexedWriter, Int64s
from plumbline.data.progress import Progress
from plumbline.data.sources import Sources
from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.data.tokenizers import (
    Encoder,
    build_tokenizer,
    check_tokenizer,
    sample_bytes,
    tokenizer_sha256,
    trained_size,
)
from plumbline.data.workspace import FolderKind, check_replaceable, is_free, new_folder

LOG = logging.getLogger(__name__)

SPLITS = ("train", "validation")
CORPUS = FolderKind(
    name="a corpus",
    marks=(MANIFEST,),
    others=(
        *(f"{split}.{ending}" for split in SPLITS for ending in ("bin", "idx")),
        *(f"tokenizer/{file}" for file in TOKENIZER_FILES),
    ),
)


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

    def identity(self) -> dict[str, Any]:
        """Return everything that shapes the corpus: the content of the files does, the number of workers does not."""
        local = Path(self.tokenizer) / "tokenizer.json"
        return {
            "source": list(self.sources.specs),
            "source_fingerprint": self.sources.fingerprint(),
            "text_key": self.sources.text_key,
            "document_separator": self.sources.document_separator,
            "tokenizer": self.tokenizer,
            "tokenizer_sha256": tokenizer_sha256(local.parent) if local.is_file() else None,
            "validation_fraction": self.validation_fraction,
            "seed": self.seed,
        }


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
        OSError: the disk is full, or a file cannot be read or written; nothing was kept.
    """
    started = time.monotonic()
    if not 0 < request.validation_fraction < 1:
        raise ValueError(f"--validation-fraction {request.validation_fraction}: expected a number between 0 and 1")
    if request.workers < 1:
        raise ValueError(f"--workers {request.workers}: expected at least 1")
    check_tokenizer(request.tokenizer)
    identity = request.identity()
    if _exists_already(request, identity):
        manifest = read_manifest(request.output)
        _warn_of_share(request, manifest, "prepare it again with --overwrite")
        return Result(request.output, manifest, None)

    with new_folder(request.output, CORPUS) as folder:
        skipped: Counter[str] = Counter()
        surveyed = _survey(request, skipped)
        LOG.info(_describe(surveyed, skipped))
        _build_tokenizer(request, surveyed, folder / "tokenizer")
        manifest = _encode(request, surveyed, folder, identity, skipped)
        _warn_of_share(request, manifest, "give more text, or another --validation-fraction")
        (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n")
    return Result(request.output, manifest, time.monotonic() - started)


def _exists_already(request: Request, identity: dict[str, Any]) -> bool:
    """Return whether this very corpus is there; an error if something else is in its place."""
    output = request.output
    if request.overwrite or is_free(output) or not (output / MANIFEST).is_file():
        check_replaceable(output, CORPUS)
        return False
    there = read_manifest(output).request
    different = [key for key in identity if there.get(key) != identity[key]]
    if different:
        changes = "; ".join(f"{key} was {there.get(key)!r}, now {identity[key]!r}" for key in different)
        raise ValueError(
            f"--output {output}: holds another corpus ({changes}); choose another name, or replace it with --overwrite"
        )
    open_corpus(output)  # raises if it is damaged
    return True


def _survey(request: Request, skipped: Counter[str]) -> Survey:
    with closing(Progress("reading", None)) as progress:
        documents = _counted(request.sources.documents(skipped), progress)
        return survey(documents, request.validation_fraction, request.seed, sample_bytes(request.tokenizer))


def _counted(documents: Iterable[str], progress: Progress) -> Iterator[str]:
    for text in documents:
        yield text
        progress.update(len(text))


def _describe(surveyed: Survey, skipped: Counter[str]) -> str:
    left_out = "".join(f", {count:,} left out ({reason})" for reason, count in sorted(skipped.items()))
    whole = surveyed.documents == 1 or surveyed.cut_above == math.inf
    cut = "" if whole else f"; the end of each of more than {surveyed.cut_above:,.0f} bytes is held out"
    return f"source: {surveyed.documents:,} documents, {surveyed.source_bytes / 1e6:,.1f} MB of text{left_out}{cut}"


def _warn_of_share(request: Request, manifest: Manifest, remedy: str) -> None:
    """Say so if the share of the text that is held out is far from the one that was asked for."""
    sizes = {name: record.source_bytes for name, record in manifest.splits.items()}
    share = sizes["validation"] / sum(sizes.values())
    if not is_near(share, request.validation_fraction):
        LOG.warning(
            f"{share:.1%} of the text is held out, and --validation-fraction asked for "
            f"{request.validation_fraction:.1%}; {remedy}"
        )


def _build_tokenizer(request: Request, surveyed: Survey, folder: Path) -> None:
    size = trained_size(request.tokenizer)
    if size:
        text = sum(map(len, surveyed.sample))
        LOG.info(f"tokenizer: training {request.tokenizer} on {len(surveyed.sample):,} documents, {text / 1e6:,.1f} MB")
    build_tokenizer(request.tokenizer, surveyed.sample, folder)
    actual = Encoder(folder, request.tokenizer).vocab_size
    if size and actual < size:
        LOG.info(f"tokenizer: the text supports {actual:,} tokens only, fewer than the {size:,} asked for")


def _encode(
    request: Request, surveyed: Survey, folder: Path, identity: dict[str, Any], skipped: Counter[str]
) -> Manifest:
    """Write the token files of both splits, and say what they are."""
    encoder = Encoder(folder / "tokenizer", request.tokenizer)
    _check_space(request, surveyed, encoder.dtype.itemsize, folder)
    source_bytes = dict.fromkeys(SPLITS, 0)
    documents = dict.fromkeys(SPLITS, 0)
    counts: dict[str, Int64s] = {name: np.zeros(encoder.vocab_size, np.int64) for name in SPLITS}

    texts = split(request.sources.documents(Counter()), surveyed, request.validation_fraction, request.seed)
    with ExitStack() as stack:
        progress = stack.enter_context(closing(Progress("tokenizing", surveyed.source_bytes)))
        writers = {name: stack.enter_context(IndexedWriter(folder / name, encoder.dtype)) for name in SPLITS}
        for part in encode_documents(texts, folder / "tokenizer", request.tokenizer, request.workers):
            name = SPLITS[part.held_out]
            writers[name].add_documents(part.tokens, part.lengths)
            counts[name] += np.bincount(part.tokens, minlength=encoder.vocab_size)
            source_bytes[name] += part.source_bytes
            documents[name] += len(part.lengths)
            progress.update(part.source_bytes)
    if sum(source_bytes.values()) != surveyed.source_bytes:
        raise ValueError("the source changed while it was being read; run the same command again when it is at rest")

    files = {file: facts for writer in writers.values() for file, facts in writer.files.items()}
    return Manifest(
        tokenizer=TokenizerRecord(spec=request.tokenizer, sha256=tokenizer_sha256(folder / "tokenizer")),
        vocab_size=encoder.vocab_size,
        eos_token_id=encoder.eos_token_id,
        splits={
            name: SplitRecord(
                documents=documents[name], tokens=int(counts[name].sum()), source_bytes=source_bytes[name]
            )
            for name in SPLITS
        },
        files={file: FileRecord(**asdict(facts)) for file, facts in files.items()},
        unigram_entropy=unigram_entropy(counts["train"], counts["validation"]),
        request=identity,
        skipped=dict(skipped),
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "tokenizers", "sentencepiece", "transformers", "datasets")},
        },
    )


def _check_space(request: Request, surveyed: Survey, token_bytes: int, folder: Path) -> None:
    """Refuse early what cannot fit: exact for bytes, and four bytes of text per token, which is usual, for the rest."""
    text_per_token = 1 if request.tokenizer == "byte" else 4
    needed = surveyed.source_bytes // text_per_token * token_bytes + surveyed.documents * (token_bytes + 20)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"--output {request.output}: needs about {needed / 1e6:,.1f} MB and the device has {free / 1e6:,.1f} MB "
            "free; free some space, or choose another place"
        )


def unigram_entropy(train: Int64s, validation: Int64s) -> float:
    """Return nats per validation token under the train token counts, one added to each so that none is impossible.

    Args:
        train: [vocab_size] counts.
        validation: [vocab_size] counts.
    """
    log_probabilities = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation * log_probabilities).sum() / validation.sum())
