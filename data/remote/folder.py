"""Access the files of a corpus folder at a URL: small ones at once, shards when they are read."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash

from plumbline.data.folders import ShardFacts
from plumbline.data.indexed import BLOCK_BYTES
from plumbline.data.manifest import MANIFEST
from plumbline.data.paths import check_url
from plumbline.data.remote.cache import Cache
from plumbline.data.remote.fetch import TRIES, WRONG, RefusedError, RemoteError, again, call, facts, read
from plumbline.data.remote.files import RemoteFile, unchecked
from plumbline.data.remote.piece import Piece
from plumbline.data.remote.tokens import RemoteTokens

TOKENIZER = "tokenizer.json"
OTHERS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "tekken.json",
    "chat_template.jinja",
)  # fmt: skip
"""Other files of a tokenizer, requested by name since not every server lists folders."""
PAGES = (b"<!doctype", b"<html")
"""Beginnings, in small letters, of the pages that some servers send with status 200 for a file that is missing."""


class RemoteFolder:
    """Access the files of a folder at a URL.

    Args:
        url: fsspec URL of the folder.
        cache: where its parts are cached.

    Raises:
        ValueError: the URL contains a password or a signature.
    """

    def __init__(self, url: str, cache: Cache) -> None:
        check_url(url)
        self.path = url.rstrip("/")
        self._cache = cache
        self._small: dict[str, Piece] = {}

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.path.rpartition("/")[2]

    def __truediv__(self, name: str) -> str:
        return f"{self.path}/{name}"

    def within(self, name: str) -> "RemoteFolder":
        """Return a folder within this one, or this one if the name is empty."""
        return RemoteFolder(self / name, self._cache) if name else self

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of this name.

        Raises:
            RefusedError: the server refuses it, or it is missing from one that does not say so.
            RemoteError: the server does not answer.
        """
        if any(sign in self.path for sign in "*?["):
            return False
        try:
            self._piece(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Return all of a small file, which is cached for as long as the server has this version of it.

        Raises:
            FileNotFoundError: there is no such file.
            RemoteError: it cannot be fetched.
        """
        with self._cache.open(self._piece(name)) as file:
            return file.read()

    def forget(self, name: str) -> None:
        """Drop the copy of a file that turned out to be damaged."""
        self._cache.forget(self._piece(name))

    def check_sizes(self, sizes: Mapping[str, int], manifest: str) -> None:
        """Do nothing: every part is checked when it arrives."""

    def checksum(self, name: str) -> str:
        """Read a whole file from the server and return its checksum.

        Raises:
            RemoteError: it cannot be fetched.
        """
        piece = self._piece(name)
        digest = xxhash.xxh3_64()
        for start in range(0, piece.size, BLOCK_BYTES):
            digest.update(read(piece, start, min(start + BLOCK_BYTES, piece.size)))
        return digest.hexdigest()

    def open_shard(self, facts: ShardFacts) -> RemoteTokens:
        """Open one pair; nothing is fetched until it is read."""
        tokens, index = (
            RemoteFile(self / f"{facts.prefix}.{ending}", file.size, file.xxh3_64, file.blocks)
            for ending, file in (("bin", facts.bin_file), ("idx", facts.idx_file))
        )
        return RemoteTokens(self._cache, tokens, index, (facts.itemsize, facts.documents))

    def tokenizer(self, sha256: str) -> Path:
        """Return a local folder with the tokenizer, which the first process fetches.

        Raises:
            RemoteError: it cannot be fetched or kept, or does not match corpus.json.
        """
        # Files beside tokenizer.json may change along with corpus.json; a generation has no corpus.json but a unique
        # name
        manifest = self._small[MANIFEST].key if MANIFEST in self._small else ""
        place = xxhash.xxh3_64_hexdigest(f"{self.path}{manifest}".encode())
        folder = self._cache.folder / "tokenizers" / f"{sha256[:16]}-{place[:8]}"
        with self._cache.usable(), self._cache.locked("tokenizers.lock"):
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
                partial.mkdir(parents=True)
                try:
                    self._fetch_tokenizer(partial, sha256)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        return folder

    def _fetch_tokenizer(self, folder: Path, sha256: str) -> None:
        url = self / f"tokenizer/{TOKENIZER}"
        for _ in range(WRONG):
            try:
                data = self._whole(f"tokenizer/{TOKENIZER}")
            except FileNotFoundError as error:
                raise RemoteError(f"{url}: no such file; copy the corpus there again") from error
            if hashlib.sha256(data).hexdigest() == sha256:
                break
        else:
            raise RemoteError(
                f"{url}: not the tokenizer that corpus.json names by its hash; copy the corpus there again"
            )
        (folder / TOKENIZER).write_bytes(data)
        for name in OTHERS:
            try:
                data = self._whole(f"tokenizer/{name}")
            except FileNotFoundError:
                continue
            except RefusedError:  # missing, if what is there is not refused as well
                facts(url)
                continue
            if data.lstrip()[:9].lower().startswith(PAGES):  # by a server that has no status for what is missing
                continue
            if name.endswith(".json") and not _is_json(data):
                raise RemoteError(
                    f"{self / f'tokenizer/{name}'}: is no JSON; copy the corpus there again, or have the server answer "
                    "404 for files that it does not have"
                )
            (folder / name).write_bytes(data)

    def _whole(self, name: str) -> bytes:
        """Return all of a file without caching it."""
        url = self / name
        size, _ = facts(url)
        data: bytes = again(url, "the file", lambda: _of_size(call(url, "cat_file"), size), TRIES)
        return data

    def _piece(self, name: str) -> Piece:
        if name not in self._small:
            self._small[name] = unchecked(self / name).whole()
        return self._small[name]


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _of_size(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise OSError(f"{len(data):,} bytes came instead of {size:,}")
    return data
