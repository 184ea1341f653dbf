"""Divide remote files into pieces that are fetched and checked one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from plumbline.data.indexed import BLOCK_BYTES
from plumbline.data.remote.fetch import facts
from plumbline.data.remote.piece import Piece


@dataclass(frozen=True)
class RemoteFile:
    """Describe one remote file."""

    url: str
    size: int
    checksum: str | None
    """xxh3-64 of the whole file, or None if unknown."""
    blocks: Sequence[str] = ()
    """xxh3-64 of each block of `BLOCK_BYTES`; empty if only the checksum of the whole is known."""
    version: str | None = None
    """A value that changes with the file, if no checksum is known."""

    def __post_init__(self) -> None:
        if self.blocks and len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(
                f"{self.url}: {len(self.blocks)} checksums of blocks do not fit {self.size} bytes in corpus.json; "
                "prepare the corpus again with --overwrite"
            )

    def whole(self) -> Piece:
        """Return the file as one piece."""
        known = self.checksum
        key = known or xxhash.xxh3_64_hexdigest(f"{self.url} {self.size} {self.version}".encode())
        return Piece(self.url, 0, self.size, self.size, f"{key}-{self.size}", known, self.version)

    def covering(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces that cover bytes [start, stop): the whole file if only that has a checksum.

        Without a checksum (a bare Megatron-LM pair), blocks are fetched, and only their length and version are checked.
        """
        if self.size <= BLOCK_BYTES or (self.checksum is not None and not self.blocks):
            return [self.whole()] if stop > start else []
        return [self._block(number) for number in range(start // BLOCK_BYTES, -(-min(stop, self.size) // BLOCK_BYTES))]

    def _block(self, number: int) -> Piece:
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.size)
        known = self.blocks[number] if self.blocks else None
        key = known or xxhash.xxh3_64_hexdigest(f"{self.url} {self.size} {self.version} {number}".encode())
        return Piece(self.url, start, stop, self.size, f"{key}-{stop - start}", known, self.version)


def unchecked(url: str) -> RemoteFile:
    """Describe a file without a manifest, using what the server reports.

    Raises:
        FileNotFoundError: there is no such file.
        RemoteError: the server does not answer.
    """
    size, version = facts(url)
    return RemoteFile(url, size, None, version=version)
