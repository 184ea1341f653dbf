"""Read every byte of a corpus to compare checksums and count tokens."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from plumbline.data.corpus import folder_at, open_corpus, read_manifest
from plumbline.data.folders import CorpusFolder
from plumbline.data.indexed import Int64s, token_dtype
from plumbline.data.manifest import MANIFEST, FileRecord, Manifest
from plumbline.data.paths import is_url
from plumbline.data.preparation.encoding import SPLITS
from plumbline.data.preparation.manifest import pairs_of
from plumbline.data.tokenizers import TOKENIZER, Encoder

BLOCK_BYTES = 4 << 20
THREADS = 8


def verify(path: str | Path) -> tuple[Manifest, list[str]]:
    """Compare every token file of a corpus, and its tokenizer, with the manifest.

    Args:
        path: A folder, or a URL that fsspec knows.

    Returns:
        The manifest, and for each damaged file its name and what is wrong with it.

    Raises:
        ValueError: there is no corpus, or its manifest contradicts its files.
        OSError: a file cannot be read.
    """
    folder = folder_at(path)
    if not folder.has(MANIFEST):
        raise ValueError(f"{path}: no corpus here (no {MANIFEST})")
    manifest = read_manifest(path)
    folder = folder.within(manifest.folder)
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(lambda file: _damage(folder, *file), sorted(manifest.files.items())))
    name = f"tokenizer/{TOKENIZER}"
    if not folder.has(name):
        found.append(f"{name}: is missing")
    elif (actual := hashlib.sha256(folder.read(name)).hexdigest()) != manifest.tokenizer.sha256:
        found.append(f"{name}: SHA-256 {actual}, {MANIFEST} expects {manifest.tokenizer.sha256}")
    damaged = [damage for damage in found if damage]
    if not damaged and not is_url(path):
        open_corpus(path)  # its other statements about the files have to be true as well
        damaged.extend(_tokenizer_damage(Path(path) / manifest.folder / "tokenizer", manifest))
    return manifest, damaged


def _tokenizer_damage(folder: Path, manifest: Manifest) -> list[str]:
    """Return how the settings of a tokenizer, which have no checksum, differ from those that made the tokens."""
    try:
        encoder = Encoder(folder, manifest.tokenizer.spec)
    except ValueError as error:
        return [f"tokenizer: {error}"]
    found, expected = (encoder.begins_with, encoder.eos_token_id), (manifest.begins_with, manifest.eos_token_id)
    return [] if found == expected else [f"tokenizer: texts begin and end with {found}, {MANIFEST} expects {expected}"]


def _damage(folder: CorpusFolder, name: str, record: FileRecord) -> str | None:
    if not folder.has(name):
        return f"{name}: is missing"
    actual = folder.checksum(name)
    return None if actual == record.xxh3_64 else f"{name}: checksum {actual}, {MANIFEST} expects {record.xxh3_64}"


def checked_frequencies(folder: Path) -> tuple[Manifest, Int64s]:
    """Return the manifest of an intact corpus, and how often each token occurs: [train and validation, vocab_size].

    Raises:
        ValueError: a file is damaged.
    """
    manifest, damaged = verify(folder)
    if damaged:
        raise ValueError(f"{folder}: {'; '.join(damaged)}; copy the corpus again, or prepare it again")
    frequencies = np.zeros((len(SPLITS), manifest.vocab_size), np.int64)
    for number, split in enumerate(SPLITS):
        for pair in pairs_of(manifest, split):
            with (folder / manifest.folder / f"{pair}.bin").open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    tokens = np.frombuffer(block, token_dtype(manifest.vocab_size))
                    frequencies[number] += np.bincount(tokens, minlength=manifest.vocab_size)
    return manifest, frequencies
