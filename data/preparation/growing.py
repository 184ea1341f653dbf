"""Append documents to a corpus, or merge several corpora; existing tokens are never tokenized again.

Files are hard-linked if possible, else copied. Existing files are read to check them and to count their tokens.
"""

import logging
import math
import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.data.corpus import fingerprint_of, folder_at, read_manifest
from plumbline.data.heldout import HeldOut, UInt64s, as_before
from plumbline.data.indexed import Int64s
from plumbline.data.locks import is_held
from plumbline.data.manifest import (
    MANIFEST,
    SHAPES_THE_SPLIT,
    Counts,
    FileRecord,
    HeldOutRecord,
    Manifest,
    SplitRecord,
)
from plumbline.data.preparation.duplicates import check_mode
from plumbline.data.preparation.encoding import CHANGED, SPLITS
from plumbline.data.preparation.filling import Filled, fill
from plumbline.data.preparation.manifest import (
    CORPUS,
    finish,
    finished,
    pairs_of,
    unigram_entropy,
    versions,
)
from plumbline.data.preparation.request import Request, check_workers, key_of
from plumbline.data.preparation.shards import sum_of
from plumbline.data.preparation.verifying import checked_frequencies
from plumbline.data.prepare import Result, exists_already, warn_of_share
from plumbline.data.sizes import counted, in_units
from plumbline.data.sources import MOST_FILES, REPEAT, Listed, Sources
from plumbline.data.tokenizers import copy_tokenizer
from plumbline.data.workspace import CLOSED, new_folder, resumed_folder

LOG = logging.getLogger(__name__)

Parts = list[tuple[Counts | None, list[str]]]
"""The parts of a split, in order: counts (None if a corpus lacks the split) and names of the pairs."""


def append(
    corpus: Path,
    sources: Sources,
    workers: int = 1,
    shard_bytes: int | None = None,
    deduplicate: str | None = None,
    skip_bad: bool = False,
    reads_as_before: bool = False,
) -> Result:
    """Add the documents of more sources to a corpus, in new shards, unless they were added already.

    The corpus's tokenizer and its rule for holding documents out are used. Duplicates are only found among the new
    documents.

    Args:
        corpus: folder of the corpus.
        sources: what to add.
        workers: processes.
        shard_bytes: bytes of text per shard; None makes one shard.
        deduplicate: "exact" or "near", as in duplicates; None keeps every document.
        skip_bad: leave damaged records out.
        reads_as_before: read rows and texts with the corpus's own options instead of those in `sources`.

    Raises:
        ValueError: there is no corpus, it is damaged, or the request cannot be met; the corpus is unchanged.
        OSError: as for `prepare`.
    """
    started = time.monotonic()
    check_mode(deduplicate)
    check_workers(workers)
    before = _manifest_of(corpus)
    if before.held_out is None:  # of token files, or merged of parts with different rules
        tokenizer = shlex.quote(str(corpus / before.folder / "tokenizer"))
        raise ValueError(
            f"--output {corpus}: its texts were not held out by one rule, so nothing can be appended to it; prepare "
            f"the new text by itself, with --tokenizer {tokenizer}, and --merge the two"
        )
    fraction, seed = before.request["validation_fraction"], before.request["seed"]
    if reads_as_before:
        sources = sources.reading_as(before.request)
    request = Request(
        sources, before.tokenizer.spec, corpus, fraction, seed, workers, True, shard_bytes, deduplicate, skip_bad
    )
    listed = sources.listed()
    identity = _identity(request, listed, before)
    if identity in before.request.get("appended", []):
        return Result(corpus, before, None)
    _check_new(corpus, before, identity, listed)
    key = key_of({"to": before.model_dump(), "append": identity})
    with _alone(corpus), resumed_folder(corpus, CORPUS, key) as folder:
        manifest = finished(folder) or _fill(request, listed, folder, before, identity)
        if read_manifest(corpus) != before:
            raise ValueError(f"--output {corpus}: was changed meanwhile; run the same command again")
        warn_of_share(manifest, fraction, "prepare all of the text together")
    return Result(corpus, manifest, time.monotonic() - started)


@contextmanager
def _alone(corpus: Path) -> Iterator[None]:
    """Hold a lock of the manifest: of two appends that end together, one would replace what the other has added.

    Raises:
        ValueError: another process holds it.
    """
    try:
        file = (corpus / MANIFEST).open("r+b")  # NFS locks no file that is open for reading alone
    except OSError as error:
        if error.errno not in CLOSED:
            raise
        yield  # another user's may be replaced where the folder around it may be written, which is told later
        return
    with file:
        if is_held(file.fileno(), unknown=False):
            raise ValueError(
                f"--output {corpus}: another --append is at work on it; run this one again when it has ended"
            )
        yield


def _identity(request: Request, listed: Listed, before: Manifest) -> dict[str, Any]:
    """Return what shapes the new documents; the tokenizer is the corpus's, whatever its name refers to today."""
    return {**request.identity(listed), "tokenizer_sha256": before.tokenizer.sha256}


def _check_new(corpus: Path, before: Manifest, identity: dict[str, Any], listed: Listed) -> None:
    """Refuse files that are already in the corpus: unchanged, and read with the same fields."""
    there = set(before.source_files)
    keys = listed.file_keys()
    if known := [path for key, path in keys.items() if key in there]:
        remedy = REPEAT if len(known) == len(keys) else "name the others alone"
        raise ValueError(
            f"--append {' '.join(identity['source'])}: {corpus} has the text of {len(known):,} of {len(keys):,} files "
            f"already, such as {known[0]}, and it would be there twice: {remedy}"
        )
    if not listed.are_files:
        return  # a hub dataset is identified by its name only, and may have grown
    read = ("source_fingerprint", "text_key", "text_template")
    for request in (before.request, *before.request.get("appended", [])):
        if all(request.get(key) == identity.get(key) for key in read):
            names = " ".join(identity["source"])
            raise ValueError(f"--append {names}: is in {corpus}, and its text would be there twice: {REPEAT}")


def _fill(request: Request, listed: Listed, folder: Path, before: Manifest, identity: dict[str, Any]) -> Manifest:
    """Fill the folder of a growing corpus, and return its new manifest."""
    rule = before.held_out
    assert rule is not None, "append has asked"
    corpus = request.output
    _, frequencies = checked_frequencies(corpus)
    if not (folder / "tokenizer").is_dir():
        copy_tokenizer(corpus / before.folder / "tokenizer", folder / ".tokenizer")
        (folder / ".tokenizer").replace(folder / "tokenizer")
    names = [name for split in SPLITS for name in pairs_of(before, split)]
    first = 1 + max(int((re.findall(r"-(\d+)$", name) or ["0"])[0]) for name in names)
    filled = fill(
        request,
        listed,
        folder,
        lambda split, shard: f"{split}-{first + shard:05}",
        lambda parts: _held_out_as_before(rule, request.validation_fraction, parts),
    )
    if _identity(request, request.sources.listed(), before) != identity:
        raise ValueError(CHANGED)
    _tell_of_one_split(filled, request.validation_fraction)
    _link(corpus / before.folder, folder, {file: file for file in before.files})
    manifest = _enlarged(before, filled, identity, frequencies, list(listed.file_keys()))
    finish(folder, manifest)
    return manifest


def _held_out_as_before(rule: HeldOutRecord, fraction: float, parts: Iterator[tuple[UInt64s, UInt64s]]) -> HeldOut:
    """Return the held-out rule of a corpus, with the counts of the new documents."""
    documents = total = 0
    for places, sizes in parts:
        documents, total = documents + len(places), total + int(sizes.sum())
    cut_above = math.inf if rule.cut_above is None else rule.cut_above
    return as_before(HeldOut(fraction, documents, total, int(rule.threshold, 16), cut_above))


def _tell_of_one_split(filled: Filled, fraction: float) -> None:
    """Say so if all new documents are in one split: the share of all text hardly shows where a short text went."""
    if len(filled.totals.counts) > 1 or fraction == 1:
        return
    ((split, counts),) = filled.totals.counts.items()
    new = f"--append: all new text ({counted(counts.documents, 'document')}, {in_units(counts.source_bytes)})"
    why = "the hash of a text decides, of each document as a whole"
    if split == "validation":
        LOG.warning(f"{new} is held out, and none of it is trained on; {why}: cut it into more, or add more text")
    else:
        LOG.info(f"{new} is trained on, and none of it is held out; {why}")


def _enlarged(
    before: Manifest, filled: Filled, identity: dict[str, Any], frequencies: Int64s, files: list[str]
) -> Manifest:
    """Return the manifest of a corpus with what was appended to it."""
    totals = filled.totals
    parts: dict[str, Parts] = {
        split: [
            (before.splits.get(split), pairs_of(before, split)),
            (totals.counts.get(split), totals.pairs.get(split, [])),
        ]
        for split in SPLITS
    }
    return _grown(
        before,
        splits=_joined(parts),
        files={**before.files, **totals.files},
        unigram_entropy=unigram_entropy(*(frequencies + filled.frequencies)),
        request={**before.request, "appended": [*before.request.get("appended", []), identity]},
        source_files=_remembered([before.source_files, files]),
        skipped=_summed([before.skipped, filled.skipped]),
        sources=_sources([before.sources, totals.sources]),
        bad_records=[*before.bad_records, *filled.bad],
    )


def _grown(before: Manifest, **own: Any) -> Manifest:
    """Return a manifest with new values for what grew, and the current versions of format and libraries."""
    return before.model_copy(update={"format_version": 2, "versions": versions(), "folder": "", **own})


def merge(corpora: list[Path], output: Path, overwrite: bool = False) -> tuple[Result, list[str]]:
    """Merge several corpora of the same tokenizer into a new one; they stay unchanged.

    Returns:
        The result, and warnings for the user.

    Raises:
        ValueError: their tokenizers differ, or one is damaged.
        OSError: a file cannot be read or written.
    """
    started = time.monotonic()
    if len(corpora) < 2:
        raise ValueError("--merge: expected two corpora or more")
    if output.resolve() in [corpus.resolve() for corpus in corpora]:
        raise ValueError(f"--output {output}: is one of the corpora that are merged, which stay as they are")
    manifests = [_manifest_of(corpus) for corpus in corpora]
    _check_mergeable(corpora, manifests)
    request, warnings = _request_of_all(manifests)
    if exists_already(output, request, overwrite):
        return Result(output, read_manifest(output), None), warnings
    _check_different(corpora, manifests)
    with new_folder(output, CORPUS) as folder:
        copy_tokenizer(corpora[0] / manifests[0].folder / "tokenizer", folder / "tokenizer")
        parts, files, total = _link_all(corpora, folder)
        merged = _grown(
            manifests[0],
            splits=_joined(parts),
            files=files,
            unigram_entropy=unigram_entropy(*total),
            request=request,
            source_files=_remembered([manifest.source_files for manifest in manifests]),
            skipped=_summed(manifest.skipped for manifest in manifests),
            held_out=None if warnings else manifests[0].held_out,
            sources=_sources([manifest.sources for manifest in manifests]),
            bad_records=[bad for manifest in manifests for bad in manifest.bad_records],
        )
        finish(folder, merged)
    return Result(output, merged, time.monotonic() - started), warnings


def _check_mergeable(corpora: list[Path], manifests: list[Manifest]) -> None:
    """Refuse corpora whose tokens differ in meaning.

    Raises:
        ValueError: names the first corpus, and the first that differs from it in tokenizer, beginning or end of
            documents.
    """
    first = manifests[0]
    for corpus, manifest in zip(corpora, manifests, strict=True):
        if manifest.tokenizer.sha256 != first.tokenizer.sha256:
            raise ValueError(
                f"--merge: the tokenizers of {corpora[0]} and {corpus} differ; prepare one again with the other's"
            )
        if manifest.begins_with != first.begins_with:
            raise ValueError(
                f"--merge: documents of {corpora[0]} begin with {first.begins_with}, of {corpus} with "
                f"{manifest.begins_with}; prepare one again with the other's tokenizer"
            )
        if manifest.eos_token_id != first.eos_token_id:
            raise ValueError(
                f"--merge: documents of {corpora[0]} end with token {first.eos_token_id}, of {corpus} with "
                f"{manifest.eos_token_id}; prepare one again with the other's tokenizer"
            )


def _link_all(corpora: list[Path], folder: Path) -> tuple[dict[str, Parts], dict[str, FileRecord], Int64s]:
    """Link the pairs of several corpora into one folder, numbered consecutively, and read them to check them.

    Returns:
        The parts of each split, the file records by new name, and how often each token occurs [train and validation,
        vocab_size].

    Raises:
        ValueError: a corpus is damaged.
        OSError: a file cannot be read or written.
    """
    parts: dict[str, Parts] = {split: [] for split in SPLITS}
    files: dict[str, FileRecord] = {}
    total = np.zeros((len(SPLITS), read_manifest(corpora[0]).vocab_size), np.int64)
    for corpus in corpora:
        manifest, frequencies = checked_frequencies(corpus)
        total += frequencies
        for split in SPLITS:
            first = sum(len(names) for _, names in parts[split])
            renamed = {name: f"{split}-{first + n:05}" for n, name in enumerate(pairs_of(manifest, split))}
            parts[split].append((manifest.splits.get(split), list(renamed.values())))
            of_pairs = {f"{a}.{end}": f"{b}.{end}" for a, b in renamed.items() for end in ("bin", "idx")}
            _link(corpus / manifest.folder, folder, of_pairs)
            files.update({new: manifest.files[old] for old, new in of_pairs.items()})
    return parts, files, total


def _check_different(corpora: list[Path], manifests: list[Manifest]) -> None:
    """Refuse two corpora with the same tokens, or made from the same file."""
    first: dict[str, int] = {}  # fingerprint, or key of a file -> number of the corpus
    for number, manifest in enumerate(manifests):
        if (before := first.setdefault(fingerprint_of(manifest), number)) != number:
            raise ValueError(
                f"--merge {corpora[before]} {corpora[number]}: hold the same text, which would be there twice: {REPEAT}"
            )
        shared = [key for key in manifest.source_files if first.setdefault(key, number) != number]
        if shared:
            raise ValueError(
                f"--merge {corpora[first[shared[0]]]} {corpora[number]}: {len(shared):,} of "
                f"{len(manifest.source_files):,} files were read for both, and their text would be there twice: "
                "prepare one without them"
            )


def _manifest_of(corpus: Path) -> Manifest:
    if not folder_at(corpus).has(MANIFEST):
        raise ValueError(f"{corpus}: no corpus here (no {MANIFEST}); make one with --source")
    return read_manifest(corpus)


def _request_of_all(manifests: list[Manifest]) -> tuple[dict[str, Any], list[str]]:
    """Return the request of the merged corpus, and warnings about how the splits of its parts combine."""
    merged = [
        {
            "request": manifest.request,
            "files": {name: record.xxh3_64 for name, record in sorted(manifest.files.items())},
        }
        for manifest in manifests
    ]
    rules = [manifest.held_out_by for manifest in manifests]
    if all(rule == rules[0] for rule in rules):
        return {"merged": merged, **{key: manifests[0].request.get(key) for key in SHAPES_THE_SPLIT}}, []
    return {"merged": merged}, [
        "the corpora were split by different rules (seed, --validation-fraction, or documents that were cut): a text "
        "that is in both may be held out of one and trained on in the other"
    ]


def _joined(splits: dict[str, Parts]) -> dict[str, SplitRecord]:
    """Return the records of splits made of these parts, without splits that have no part."""
    joined = {}
    for split, parts in splits.items():
        counts: Counts | None = None
        for part, _ in parts:
            counts = part if counts is None else counts if part is None else sum_of(counts, part)
        if counts is not None:
            sizes = {name: getattr(counts, name) for name in Counts.model_fields}
            joined[split] = SplitRecord(**sizes, shards=[name for _, names in parts for name in names])
    return joined


def _sources(parts: list[dict[str, dict[str, Counts]]]) -> dict[str, dict[str, Counts]]:
    """Add counts by source."""
    joined: dict[str, dict[str, Counts]] = {}
    for part in parts:
        for source, splits in part.items():
            for split, counts in splits.items():
                there = joined.setdefault(source, {}).get(split)
                joined[source][split] = sum_of(there, counts) if there else counts
    return joined


def _remembered(parts: Iterable[list[str]]) -> list[str]:
    """Return the keys of all source files; empty if there are too many for a manifest."""
    keys = [key for part in parts for key in part]
    return keys if len(keys) <= MOST_FILES else []


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def _link(source: Path, target: Path, names: dict[str, str]) -> None:
    """Link or copy files from one folder into another; `names` maps old names to new ones."""
    for old, new in names.items():
        staging = target / f".{new}.staging"
        staging.unlink(missing_ok=True)  # left by an earlier run
        try:
            os.link(source / old, staging)
        except OSError:  # a different file system, or one without links
            shutil.copyfile(source / old, staging)
        staging.replace(target / new)
        staging.unlink(missing_ok=True)  # it stays if the two are links to one file
