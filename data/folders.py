"""Reach the files of a corpus folder on this machine, as remote/folder.py does at a URL."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plumbline.data.disk import is_file
from plumbline.data.indexed import FileFacts, file_facts, open_indexed
from plumbline.data.paths import last_part
from plumbline.data.shards import Tokens

AT_ONCE = 16
"""Files that are asked for their sizes at a time: a file system at the other end of a network takes long to answer."""


class UnlikeManifestError(ValueError):
    """State that a file is missing, or has another size than its manifest says."""


@dataclass(frozen=True)
class ShardFacts:
    """Hold what a manifest says about one pair."""

    prefix: str
    itemsize: int
    """Bytes of one token."""
    documents: int | None
    """Number of documents, or None for one of several pairs."""
    bin_file: FileFacts
    idx_file: FileFacts

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.bin_file.size // self.itemsize


class CorpusFolder(Protocol):
    """Reach the files of one folder; `folder / name` is how messages name a file."""

    @property
    def name(self) -> str:
        """Return the last part of the address."""

    @property
    def path(self) -> Path | str:
        """Return the address."""

    def __truediv__(self, name: str) -> Path | str:
        """Return the address of a file."""

    def within(self, name: str) -> "CorpusFolder":
        """Return a folder within this one, or this one if the name is empty."""

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""

    def read(self, name: str) -> bytes:
        """Return all of a small file."""

    def forget(self, name: str) -> None:
        """Drop the copy of a file that turned out to be damaged."""

    def check_sizes(self, sizes: Mapping[str, int], manifest: str) -> None:
        """Compare sizes of files with those that the file `manifest` states, as far as parts are not checked later."""

    def checksum(self, name: str) -> str:
        """Read a whole file and return its checksum."""

    def open_shard(self, facts: ShardFacts) -> Tokens:
        """Open one pair."""

    def tokenizer(self, sha256: str) -> Path:
        """Return a folder on this machine that holds the tokenizer."""


@dataclass(frozen=True)
class LocalFolder:
    """Reach the files of a folder on this machine."""

    path: Path

    @property
    def name(self) -> str:
        """Return the last part of the path; for a link, the link's own name."""
        return last_part(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def within(self, name: str) -> "LocalFolder":
        """Return a folder within this one, or this one if the name is empty."""
        return LocalFolder(self.path / name) if name else self

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        return is_file(self.path / name)

    def read(self, name: str) -> bytes:
        """Return all of a small file."""
        return (self.path / name).read_bytes()

    def forget(self, name: str) -> None:
        """Do nothing: there is no copy, and the file is the user's."""

    def check_sizes(self, sizes: Mapping[str, int], manifest: str) -> None:
        """Compare sizes.

        Raises:
            UnlikeManifestError: a file is missing or has a different size; names the first in the order of `sizes`.
        """
        files = list(sizes.items())
        share = max(AT_ONCE, -(-len(files) // AT_ONCE))  # a thread costs as much as many files of a local disk
        shares = [files[first : first + share] for first in range(0, len(files), share)]
        if len(shares) > 1:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(self._first_unlike, shares))
        else:
            found = list(map(self._first_unlike, shares))
        wrong = next(filter(None, found), None)
        if wrong is not None:
            raise UnlikeManifestError(
                f"{self.path}/{wrong[0]}: {wrong[1]}, {manifest} expects {sizes[wrong[0]]} bytes; copy the corpus "
                "again, or prepare it again with --overwrite"
            )

    def _first_unlike(self, files: Sequence[tuple[str, int]]) -> tuple[str, str] | None:
        """Return the first of some files that has another size than is expected, and what it is like."""
        folder = str(self.path)
        for name, expected in files:
            try:
                actual = os.stat(f"{folder}/{name}").st_size  # noqa: PTH116 - there may be tens of thousands
            except FileNotFoundError:
                return name, "is missing"
            if actual != expected:
                return name, f"has {actual} bytes"
        return None

    def checksum(self, name: str) -> str:
        """Read a whole file and return its checksum."""
        return file_facts(self.path / name).xxh3_64

    def open_shard(self, facts: ShardFacts) -> Tokens:
        """Open one pair."""
        return open_indexed(self.path / facts.prefix, has_checksum=True)

    def tokenizer(self, sha256: str) -> Path:
        """Return the folder of the tokenizer.

        Raises:
            ValueError: it is not the one that made the tokens, or is missing.
        """
        file = self.path / "tokenizer" / "tokenizer.json"
        if not is_file(file):
            raise ValueError(f"{file}: is missing; copy the corpus again, or prepare it again with --overwrite")
        if hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise ValueError(
                f"{file}: is not the tokenizer that made the tokens (its SHA-256 is not that in corpus.json); copy the "
                "corpus again, or prepare it again with --overwrite"
            )
        return file.parent
