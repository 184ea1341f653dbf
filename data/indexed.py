"""Read and write Megatron-LM's indexed datasets: `PREFIX.bin` holds tokens, `PREFIX.idx` says where they are.

`.bin` is every sequence's tokens end to end. `.idx` is a 34-byte header (magic, version, dtype code, number of
sequences, number of document indices), then for each sequence an int32 length and an int64 byte offset into `.bin`,
then the int64 document indices: document d is sequences `indices[d]` to `indices[d + 1]`. All numbers are
little-endian. Files written here open in Megatron-LM and its descendants, and theirs open here.
"""

import os
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from plumbline.data.boundaries import Boundaries
from plumbline.data.damage import DamagedFileError
from plumbline.data.disk import is_file

Integers = npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
BLOCK_BYTES = 8 << 20
"""Bytes of one block: each has its own checksum, so that a part of a file can be checked without the rest."""
DTYPES: dict[int, type[np.integer[Any]]] = {  # Megatron's codes; 6 and 7 are float64 and float32, never token ids
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}

AT_ONCE = 2**20
"""Entries of an index that are checked at a time, since an index may be large."""
MANY = 16
"""Fewest ranges that are searched together: below that it is not worth the memory if they lie in many files."""
LONGEST_SEQUENCE = 2**31 - 1
"""Most tokens of one sequence: its length is an int32."""


def token_dtype(vocab_size: int) -> np.dtype[np.integer[Any]]:
    """Return the smaller of the two types that Megatron-LM writes: uint16 if every id fits, else int32."""
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<i4")


@dataclass(frozen=True)
class IndexedTokens:
    """Hold an open, memory-mapped `.bin`/`.idx` pair; opening reads (part of) its index and no token."""

    prefix: Path
    tokens: Integers
    """[num_tokens]: the tokens of all documents, concatenated."""
    num_documents: int
    first_bytes: Int64s
    """[num_documents]: byte offset in `.bin` at which each document begins."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{self.prefix}.bin"

    def read(self, start: int, stop: int) -> Integers:
        """Return tokens [start, stop), cut off at the end of the stream."""
        return self.tokens[start:stop]

    def read_all(self, starts: Int64s, sizes: Int64s) -> Integers:
        """Return n ranges of tokens, concatenated: `sizes` tokens from `starts` on, all within the stream."""
        size = int(sizes[0])
        if (sizes == size).all():  # a strided view of all windows, which overlap in memory
            shape = (len(self.tokens) - size + 1, size)
            rows: Integers = np.ndarray(shape, self.tokens.dtype, self.tokens, strides=self.tokens.strides * 2)
            return rows[starts].reshape(-1)
        spans = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        return np.concatenate([self.tokens[start:stop] for start, stop in spans])

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins."""
        return starts_between(self.first_bytes, start, stop, self.tokens.itemsize)

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return the `document_starts` of n ranges, concatenated, preceded by the number of each one's range."""
        size = self.tokens.itemsize
        if len(first) < MANY:
            return starts_within(self.first_bytes, first, last, size)
        stretch, found = self._boundaries.within(first * size, last * size)
        return stretch, found // size

    @cached_property
    def _boundaries(self) -> Boundaries:
        return Boundaries(self.first_bytes)


def starts_between(first_bytes: Int64s, start: int, stop: int, itemsize: int) -> Int64s:
    """Return the document starts, in tokens of `itemsize` bytes, strictly between `start` and `stop`.

    Python's bisect rather than `numpy.searchsorted`: memory-mapped offsets are not 8-byte aligned, and numpy would copy
    all of them at every call.
    """
    first = bisect_right(first_bytes, start * itemsize)
    last = bisect_left(first_bytes, stop * itemsize, lo=first)
    return first_bytes[first:last] // itemsize


def starts_within(first_bytes: Int64s, first: Int64s, last: Int64s, itemsize: int) -> tuple[Int64s, Int64s]:
    """Return the `starts_between` of n ranges, concatenated, preceded by the number of each one's range."""
    spans = zip(first.tolist(), last.tolist(), strict=True)
    found = [starts_between(first_bytes, start, stop, itemsize) for start, stop in spans]
    return np.repeat(np.arange(len(found)), [len(each) for each in found]), np.concatenate(found)


def open_indexed(prefix: Path, has_checksum: bool = False) -> IndexedTokens:
    """Open `prefix.bin` and `prefix.idx`.

    Args:
        prefix: path without the endings.
        has_checksum: whether the index has a checksum, so that damage in it would be found elsewhere.

    Raises:
        DamagedFileError: a file is missing, is not in this format, or the two do not belong together.
    """
    index_path, token_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index_path, token_path):
        if not is_file(path):
            raise DamagedFileError(f"{path}: no such file; a corpus needs both {index_path.name} and {token_path.name}")
    with index_path.open("rb") as file:
        index = open_index(file, index_path, has_checksum=has_checksum)
    actual = token_path.stat().st_size
    if actual != index.token_bytes:
        raise DamagedFileError(
            f"{token_path}: {actual} bytes, but {index_path.name} describes {index.token_bytes}; "
            "the file is truncated or the pair does not belong together: copy or prepare it again"
        )
    with token_path.open("rb") as file:
        tokens = _map(file, index.dtype, 0, index.token_bytes // index.dtype.itemsize)
    return IndexedTokens(
        prefix=prefix,
        tokens=tokens,
        num_documents=len(index.first_bytes),
        first_bytes=index.first_bytes,
    )


@dataclass(frozen=True)
class Index:
    """Hold what an `.idx` file says about its `.bin`."""

    dtype: np.dtype[np.integer[Any]]
    token_bytes: int
    """Size of the `.bin`."""
    first_bytes: Int64s
    """[documents]: byte offset in the `.bin` at which each begins."""
    identity: bool
    """Whether each sequence is one document."""


def open_index(file: BinaryIO, name: str | Path, identity: bool | None = None, *, has_checksum: bool) -> Index:
    """Read one open `.idx` file, memory-mapped.

    Args:
        file: the file; it may be closed afterwards.
        name: what to call it in errors.
        identity: `Index.identity` of the same file, if it was opened before; None finds it out.
        has_checksum: whether corpus.json has a checksum of the file, so that Plumbline wrote it; if not, all of it is
            read and checked for consistency.

    Raises:
        DamagedFileError: it is not in this format, or damaged.
    """
    dtype, sequences, indices = read_header(file, name)
    lengths = _map(file, "<i4", HEADER.size, sequences)
    pointers = _map(file, "<i8", HEADER.size + 4 * sequences, sequences)
    documents = _map(file, "<i8", HEADER.size + 12 * sequences, indices)
    if indices < 1 or documents[0] != 0 or documents[-1] != sequences:
        raise DamagedFileError(
            f"{name}: document indices must run from 0 to the number of sequences {sequences}, "
            f"found {documents[:1].tolist()} to {documents[-1:].tolist()}; prepare the corpus again"
        )
    if not has_checksum:
        _check_pointers(lengths, pointers, dtype.itemsize, name)
        _check_documents(documents, name)
    end = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
    # Nearly always one sequence is one document, so the mapped offsets can be used without a copy.
    if identity is None:  # our writer gives each document at least one sequence, so equal counts prove it
        identity = indices == sequences + 1 and (has_checksum or _counts_by_one(documents))
    return Index(dtype, end, pointers if identity else np.append(pointers, end)[documents[:-1]], identity)


def _check_pointers(lengths: npt.NDArray[Any], pointers: Int64s, itemsize: int, name: str | Path) -> None:
    """Refuse sequences that are not contiguous."""
    at = 0
    for start in range(0, len(lengths), AT_ONCE):
        sizes = lengths[start : start + AT_ONCE].astype(np.int64) * itemsize
        ends = at + np.cumsum(sizes)
        wrong = np.flatnonzero((pointers[start : start + AT_ONCE] != ends - sizes) | (sizes < 0))
        if wrong.size:
            number = start + int(wrong[0])
            raise DamagedFileError(
                f"{name}: sequence {number} of {lengths[number]} tokens at byte {pointers[number]} does not begin "
                f"where the one before ends, byte {int((ends - sizes)[wrong[0]])}; the file is damaged: copy it again"
            )
        at = int(ends[-1])


def _check_documents(documents: npt.NDArray[np.int64], name: str | Path) -> None:
    """Refuse document indices that go back."""
    for start in range(0, len(documents) - 1, AT_ONCE):
        some = documents[start : start + AT_ONCE + 1]
        wrong = np.flatnonzero(np.diff(some) < 0)
        if wrong.size:
            number = int(wrong[0])
            raise DamagedFileError(
                f"{name}: document {start + number} runs from sequence {some[number]} to {some[number + 1]}, which is "
                "before it; the file is damaged: copy it again"
            )


def _counts_by_one(documents: npt.NDArray[np.int64], block: int = AT_ONCE) -> bool:
    """Return whether each number is one more than the one before; works in blocks of numbers."""
    starts = range(0, len(documents) - 1, block)
    return all(bool((np.diff(documents[start : start + block + 1]) == 1).all()) for start in starts)


def read_header(file: BinaryIO, name: str | Path) -> tuple[np.dtype[np.integer[Any]], int, int]:
    """Return (token dtype, number of sequences, number of document indices) of an `.idx` file whose size fits them.

    Raises:
        DamagedFileError: it is not in this format, or truncated.
    """
    file.seek(0)
    header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise DamagedFileError(
            f"{name}: starts with {header[: len(MAGIC)]!r}, expected {MAGIC!r}; "
            "this is not a Megatron-LM index: check the path, or prepare the corpus with launcher/prepare.py"
        )
    if len(header) < HEADER.size:
        raise DamagedFileError(
            f"{name}: {len(header)} bytes, expected at least {HEADER.size}; copy or prepare it again"
        )
    _, version, code, sequences, indices = HEADER.unpack(header)
    if version != VERSION:
        raise DamagedFileError(f"{name}: format version {version}, expected {VERSION}; prepare the corpus again")
    if code not in DTYPES:
        raise DamagedFileError(
            f"{name}: token type code {code}, expected one of {sorted(DTYPES)}; prepare the corpus again"
        )
    expected, actual = HEADER.size + 12 * sequences + 8 * indices, file.seek(0, os.SEEK_END)
    # Megatron's multimodal indices append one mode byte per sequence, which text training does not need.
    if actual not in (expected, expected + sequences):
        raise DamagedFileError(
            f"{name}: {actual} bytes, but its header describes {expected} ({sequences} sequences, {indices} document "
            "indices); the file is truncated or damaged: copy or prepare it again"
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, indices


def count_documents(index_bytes: int, pairs: int, tokens: int, expected: int) -> int:
    """Return how many documents some pairs hold, judged by the size of their indices.

    An index has 12 bytes per sequence and 8 per document, which does not tell how many documents have several
    sequences. So `expected` is returned if the size allows it, else the number for documents of one sequence each.
    """
    entries = index_bytes - pairs * (HEADER.size + 8)
    further, rest = divmod(entries - 20 * expected, 12)  # sequences beyond the first of each document
    return expected if rest == 0 and 0 <= further <= tokens // LONGEST_SEQUENCE else entries // 20


def _map(file: BinaryIO, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    """Return a plain array [count] over mapped memory; a memmap object would make every slice several times slower."""
    if count == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,)))


@dataclass(frozen=True)
class FileFacts:
    """Hold the size in bytes and the checksums (xxh3-64, 16 hex digits) of one file."""

    size: int
    xxh3_64: str
    blocks: list[str] = field(default_factory=list)
    """Checksum of each block of `BLOCK_BYTES` (the last may be shorter); empty for a file of a single block."""


class FileDigest:
    """Compute the facts of a file incrementally from its bytes."""

    def __init__(self) -> None:
        self._size = 0
        self._whole, self._block = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._blocks: list[str] = []

    def update(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._whole.update(data)
        rest = memoryview(data)
        while rest:
            part = rest[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            rest = rest[len(part) :]
            self._block.update(part)
            self._size += len(part)
            if self._size % BLOCK_BYTES == 0:
                self._blocks.append(self._block.hexdigest())
                self._block.reset()

    def facts(self) -> FileFacts:
        """Return the facts of a file made of the bytes so far."""
        last = [self._block.hexdigest()] if self._size % BLOCK_BYTES else []
        blocks = [*self._blocks, *last]
        return FileFacts(self._size, self._whole.hexdigest(), blocks if len(blocks) > 1 else [])


def file_facts(path: Path) -> FileFacts:
    """Read a whole file to compute its size and checksums."""
    with path.open("rb") as file:
        return facts_of(file)


def facts_of(file: BinaryIO) -> FileFacts:
    """Read an open file to its end, in little memory, to compute its size and checksums."""
    digest = FileDigest()
    while data := file.read(1 << 22):
        digest.update(data)
    return digest.facts()


class IndexedWriter:
    """Write one `.bin`/`.idx` pair as documents come, in little memory (8 bytes per document).

    A context manager: after a clean exit both files are complete, and `files` holds their facts. A document of more
    than 2^31 - 1 tokens, the limit of one sequence, is written as several sequences that form one document.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[np.integer[Any]]) -> None:
        self.files: dict[str, FileFacts] = {}
        self._prefix = prefix
        self._dtype = dtype.newbyteorder("<")
        self._lengths = array("q")
        self._file = Path(f"{prefix}.bin").open("wb")  # noqa: SIM115 - closed by __exit__
        self._digest = FileDigest()

    @property
    def num_documents(self) -> int:
        """Return the number of documents so far."""
        return len(self._lengths)

    def add_documents(self, tokens: Integers, lengths: Sequence[int], continued: bool = False) -> None:
        """Append documents whose token ids are concatenated in `tokens`.

        Args:
            tokens: [sum of lengths].
            lengths: Tokens of each document.
            continued: The first one continues the last document instead of starting a new one.
        """
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._digest.update(data)
        if continued:
            self._lengths[-1] += lengths[0]
        self._lengths.extend(lengths[1:] if continued else lengths)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self.files[f"{self._prefix.name}.bin"] = self._digest.facts()
            self._write_index()

    def _write_index(self) -> None:
        documents = np.asarray(self._lengths, "<i8")
        sequences = np.maximum(-(-documents // LONGEST_SEQUENCE), 1)  # of each document
        indices = np.concatenate([np.zeros(1, "<i8"), np.cumsum(sequences, dtype="<i8")])
        lengths = np.full(indices[-1], LONGEST_SEQUENCE, "<i4")
        lengths[indices[1:] - 1] = documents - (sequences - 1) * LONGEST_SEQUENCE
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        code = next(code for code, dtype in DTYPES.items() if np.dtype(dtype).newbyteorder("<") == self._dtype)
        path = Path(f"{self._prefix}.idx")
        with path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(indices)))
            for part in (lengths, pointers, indices):
                file.write(part.tobytes())
        self.files[path.name] = file_facts(path)
