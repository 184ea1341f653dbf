"""Read every byte of a corpus: compare checksums, count tokens."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash
from pydantic import ValidationError

from plumbline.data.corpus import MANIFEST, Manifest
from plumbline.data.indexed import Int64s, token_dtype
from plumbline.data.preparation.manifest import SPLITS, pairs_of
from plumbline.data.tokenizers import TOKENIZER

BLOCK_BYTES = 4 << 20
THREADS = 8


def verify(path: str) -> tuple[Manifest, list[str]]:
    """Compare every token file of a corpus, and its tokenizer, with what was written.

    Args:
        path: A folder, or a URL that fsspec knows.

    Returns:
        The manifest, and for each damaged file its name and what is wrong with it.

    Raises:
        ValueError: there is no corpus.
    """
    root = path.rstrip("/")
    try:
        with fsspec.open(f"{root}/{MANIFEST}", "rb") as file:
            manifest = Manifest.model_validate_json(file.read())
    except FileNotFoundError as error:
        raise ValueError(f"--verify {path}: no corpus here (no {MANIFEST})") from error
    except ValidationError as error:
        raise ValueError(f"--verify {path}: {MANIFEST} is damaged: {error.errors()[0]['msg']}") from error
    expected: list[tuple[str, Any, str]] = [
        (name, xxhash.xxh3_64(), record.xxh3_64) for name, record in sorted(manifest.files.items())
    ]
    expected.append((f"tokenizer/{TOKENIZER}", hashlib.sha256(), manifest.tokenizer.sha256))
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda facts: _damage(root, *facts), expected)
        return manifest, [damage for damage in found if damage]


def _damage(root: str, name: str, digest: Any, checksum: str) -> str | None:
    try:
        for block in _blocks(f"{root}/{name}"):
            digest.update(block)
    except FileNotFoundError:
        return f"{name}: is missing"
    actual = digest.hexdigest()
    return None if actual == checksum else f"{name}: checksum {actual}, {MANIFEST} expects {checksum}"


def checked_frequencies(folder: Path) -> tuple[Manifest, Int64s]:
    """Return the manifest of a whole corpus, and how often each token occurs: [train and validation, vocab_size].

    Raises:
        ValueError: a file is damaged.
    """
    manifest, damaged = verify(str(folder))
    if damaged:
        raise ValueError(f"{folder}: {'; '.join(damaged)}; copy the corpus again, or prepare it again")
    frequencies = np.zeros((len(SPLITS), manifest.vocab_size), np.int64)
    for number, split in enumerate(SPLITS):
        for pair in pairs_of(manifest, split):
            for block in _blocks(str(folder / f"{pair}.bin")):
                tokens = np.frombuffer(block, token_dtype(manifest.vocab_size))
                frequencies[number] += np.bincount(tokens, minlength=manifest.vocab_size)
    return manifest, frequencies


def _blocks(path: str) -> Iterator[bytes]:
    with fsspec.open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
