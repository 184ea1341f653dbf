"""State which part of a remote file is fetched and kept as one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Describe bytes `start` to `stop` of a remote file: one of its blocks, or all of it."""

    url: str
    start: int
    stop: int
    file_size: int
    key: str
    """Name in the cache: what the bytes are, or of which file and version where nobody says what they are."""
    checksum: str | None
    """What xxh3-64 makes of the bytes, 16 hex digits; None where nobody says."""

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Return whether this is the whole file, which needs no range in a request."""
        return self.size == self.file_size

    def __str__(self) -> str:
        return self.url if self.is_whole else f"{self.url} (bytes {self.start:,} to {self.stop:,})"
