"""Define the unit of a remote file that is fetched and cached."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Describe bytes [start, stop) of a remote file: one of its blocks, or all of it."""

    url: str
    start: int
    stop: int
    file_size: int
    key: str
    """Name in the cache: derived from the checksum, or from file and version if there is no checksum."""
    checksum: str | None
    """xxh3-64 of the bytes, 16 hex digits, or None if unknown."""
    version: str | None = None
    """A value that changes with the file, if no checksum is known."""

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Return whether this is the whole file, which can be requested without a range."""
        return self.size == self.file_size

    def __str__(self) -> str:
        return self.url if self.is_whole else f"{self.url} (bytes {self.start:,} to {self.stop:,})"
