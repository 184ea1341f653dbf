"""Read the tokens of a remote `.bin`/`.idx` pair through the cache; nothing of it stays in memory."""

import os
from collections import defaultdict

import numpy as np

from plumbline.data.damage import DamagedFileError
from plumbline.data.indexed import Index, Int64s, Integers, open_index, starts_within
from plumbline.data.remote.cache import Cache
from plumbline.data.remote.files import RemoteFile
from plumbline.data.remote.piece import Piece


class RemoteTokens:
    """Read one remote pair, fetching the index whole and the tokens in pieces.

    Args:
        cache: where pieces are cached.
        tokens: the `.bin`.
        index: the `.idx`.
        shape: bytes of one token, and the number of documents if known; None opens the index now.
    """

    def __init__(
        self, cache: Cache, tokens: RemoteFile, index: RemoteFile, shape: tuple[int, int | None] | None = None
    ) -> None:
        self._cache, self._tokens, self._index = cache, tokens, index
        self._shape = shape
        self._identity: bool | None = None
        if shape is None:
            found = self._open()
            self._shape = found.dtype.itemsize, len(found.first_bytes)
        assert self._shape is not None
        self._itemsize, self._documents = self._shape

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._tokens.size // self._itemsize

    def __str__(self) -> str:
        return self._tokens.url

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self._open().first_bytes) if self._documents is None else self._documents

    @property
    def index_piece(self) -> Piece:
        """Return the whole index."""
        return self._index.whole()

    def read(self, start: int, stop: int) -> Integers:
        """Return tokens [start, stop), cut off at the end of the stream."""
        return self.read_all(np.array([start]), np.array([max(0, min(stop, len(self)) - start)]))

    def read_all(self, starts: Int64s, sizes: Int64s) -> Integers:
        """Return n ranges of tokens, concatenated: `sizes` tokens from `starts` on, all within the stream."""
        dtype, parts = self._open().dtype, defaultdict[Piece, list[tuple[int, int, int]]](list)
        ends = np.cumsum(sizes)
        spans = np.stack([starts, starts + sizes, ends - sizes], axis=1) * dtype.itemsize
        for first, last, place in spans.tolist():
            for piece in self._tokens.covering(first, last):
                begin, end = max(first, piece.start), min(last, piece.stop)
                parts[piece].append((begin - piece.start, end - piece.start, place + begin - first))
        tokens = np.empty(ends[-1], dtype)
        memory = tokens.data.cast("B")
        for piece, wanted in parts.items():  # each is opened once
            with self._cache.open(piece) as file:
                for begin, end, place in wanted:
                    if os.preadv(file.fileno(), [memory[place : place + end - begin]], begin) < end - begin:
                        raise DamagedFileError(f"{self}: a part of it was cut after it had been checked: {file.name}")
        return tokens

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""
        return self.documents_within(np.array([start]), np.array([stop]))[1]

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return the `document_starts` of n ranges, concatenated, preceded by the number of each one's range."""
        return starts_within(self._open().first_bytes, first, last, self._itemsize)

    def remote_pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces needed to read tokens [start, stop) and their document starts, in order."""
        size = self._itemsize
        return [self.index_piece, *self._tokens.covering(start * size, min(stop, len(self)) * size)]

    def _open(self) -> Index:
        """Map the index for as long as the result lives, since the cache may remove its file at any time."""
        with self._cache.open(self.index_piece) as file:
            has_checksum = self._index.checksum is not None or self._identity is not None  # or it was read before
            index = open_index(file, self._index.url, self._identity, has_checksum=has_checksum)
        if index.token_bytes != self._tokens.size:
            raise DamagedFileError(
                f"{self._tokens.url}: {self._tokens.size} bytes, but {self._index.url} describes {index.token_bytes}; "
                "the pair does not belong together: copy or prepare it again"
            )
        found = index.dtype.itemsize, len(index.first_bytes)
        if self._shape not in (None, found, (found[0], None)):
            raise DamagedFileError(
                f"{self._index.url}: {found[0]} bytes per token and {found[1]} documents, where corpus.json makes "
                f"{self._shape} of it; prepare the corpus again with --overwrite"
            )
        self._identity = index.identity
        return index
