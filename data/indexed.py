"""Read and write Megatron-LM's indexed dataset: `PREFIX.bin` holds tokens, `PREFIX.idx` says where they are.

`.bin` is every sequence's tokens end to end. `.idx` is a 34-byte header (magic, version, dtype code, number of
sequences, number of document indices), then for each sequence an int32 length and an int64 byte offset into `.bin`,
then the int64 document indices: document d is sequences `indices[d]` to `indices[d + 1]`. All numbers are
little-endian. Files written here open in Megatron-LM and its descendants, and theirs open here.
"""

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from plumbline.data.boundaries import Boundaries

Integers = npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
DTYPES: dict[int, type[np.integer[Any]]] = {  # Megatron's codes; 6 and 7 are float64 and float32, never token ids
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def token_dtype(vocab_size: int) -> np.dtype[np.integer[Any]]:
    """Return the smaller of the two types that Megatron-LM writes: uint16 where every id fits, else int32."""
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<i4")


@dataclass(frozen=True)
class IndexedTokens:
    """Hold an open, memory-mapped `.bin`/`.idx` pair; opening costs the same for a kilobyte and a terabyte."""

    prefix: Path
    tokens: Integers
    """[num_tokens]: the documents' tokens end to end."""
    num_documents: int
    first_bytes: Int64s
    """[num_documents]: byte offset in `.bin` at which each document begins."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{self.prefix}.bin"

    def read(self, start: int, stop: int) -> Integers:
        """Return tokens `start` to `stop`, without those beyond the end."""
        return self.tokens[start:stop]

    @cached_property
    def _boundaries(self) -> Boundaries:
        return Boundaries(self.first_bytes)

    def documents_within(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Return `document_starts` of n stretches at once, end to end, and for each the stretch that it lies in."""
        size = self.tokens.itemsize
        stretch, found = self._boundaries.within(first * size, last * size)
        return stretch, found // size

    def document_starts(self, start: int, stop: int) -> Int64s:
        """Return the offsets, in tokens, strictly between `start` and `stop` at which a document begins.

        Python's bisect rather than `numpy.searchsorted`: the memory-mapped offsets are not 8-byte aligned, and
        numpy would copy all of them at every call.
        """
        size = self.tokens.itemsize
        first = bisect_right(self.first_bytes, start * size)
        last = bisect_left(self.first_bytes, stop * size, lo=first)
        return self.first_bytes[first:last] // size


def open_indexed(prefix: Path) -> IndexedTokens:
    """Open `prefix.bin` and `prefix.idx`.

    Raises:
        ValueError: a file is missing, is not in this format, or the two do not belong together.
    """
    index_path, token_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index_path, token_path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a corpus needs both {index_path.name} and {token_path.name}")
    dtype, sequences, indices = _read_header(index_path)

    lengths = _map(index_path, "<i4", HEADER.size, sequences)
    pointers = _map(index_path, "<i8", HEADER.size + 4 * sequences, sequences)
    documents = _map(index_path, "<i8", HEADER.size + 12 * sequences, indices)
    if indices < 1 or documents[0] != 0 or documents[-1] != sequences:
        raise ValueError(
            f"{index_path}: document indices must run from 0 to the number of sequences {sequences}, "
            f"found {documents[:1].tolist()} to {documents[-1:].tolist()}; prepare the corpus again"
        )
    expected = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
    actual = token_path.stat().st_size
    if actual != expected:
        raise ValueError(
            f"{token_path}: {actual} bytes, but {index_path.name} describes {expected}; "
            "the file is truncated or the pair does not belong together: copy or prepare it again"
        )
    # Nearly always one sequence is one document, and the mapped offsets serve as they are, without a copy.
    identity = indices == sequences + 1 and bool(np.all(documents[1:] - documents[:-1] == 1))
    return IndexedTokens(
        prefix=prefix,
        tokens=_map(token_path, dtype, 0, expected // dtype.itemsize),
        num_documents=indices - 1,
        first_bytes=pointers if identity else np.append(pointers, expected)[documents[:-1]],
    )


def _read_header(path: Path) -> tuple[np.dtype[np.integer[Any]], int, int]:
    """Return (token dtype, number of sequences, number of document indices) of an `.idx` file whose size fits them."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{path}: starts with {header[: len(MAGIC)]!r}, expected {MAGIC!r}; "
            "this is not a Megatron-LM index: check the path, or prepare the corpus with launcher/prepare.py"
        )
    if len(header) < HEADER.size:
        raise ValueError(f"{path}: {len(header)} bytes, expected at least {HEADER.size}; copy or prepare it again")
    _, version, code, sequences, indices = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{path}: format version {version}, expected {VERSION}; prepare the corpus again")
    if code not in DTYPES:
        raise ValueError(f"{path}: token type code {code}, expected one of {sorted(DTYPES)}; prepare the corpus again")
    expected, actual = HEADER.size + 12 * sequences + 8 * indices, path.stat().st_size
    # Megatron's multimodal indices append one mode byte per sequence, which text training does not need.
    if actual not in (expected, expected + sequences):
        raise ValueError(
            f"{path}: {actual} bytes, but its header describes {expected} ({sequences} sequences, {indices} document "
            "indices); the file is truncated or damaged: copy or prepare it again"
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, indices


def _map(path: Path, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    """Return a plain array [count] over mapped memory; a memmap object would make every slice several times slower."""
    if count == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


@dataclass(frozen=True)
class FileFacts:
    """Hold the size in bytes and the xxh3-64 checksum (16 hex digits) of one file."""

    size: int
    xxh3_64: str


def file_facts(path: Path) -> FileFacts:
    """Read a whole file to find its size and checksum."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return FileFacts(size, digest.hexdigest())


class IndexedWriter:
    """Write one `.bin`/`.idx` pair as documents come, in little memory (4 bytes per document).

    A context manager: after a clean exit both files are complete, and `files` holds their facts.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[np.integer[Any]]) -> None:
        self.files: dict[str, FileFacts] = {}
        self._prefix = prefix
        self._dtype = dtype.newbyteorder("<")
        self._lengths = array("i")
        self._file = Path(f"{prefix}.bin").open("wb")  # noqa: SIM115 - closed by __exit__
        self._digest = xxhash.xxh3_64()

    def add_documents(self, tokens: Integers, lengths: Sequence[int]) -> None:
        """Append documents, their token ids end to end in `tokens`."""
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._lengths.extend(lengths)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            size = self._file.tell()
        if kind is None:
            self.files[f"{self._prefix.name}.bin"] = FileFacts(size, self._digest.hexdigest())
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.asarray(self._lengths, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        code = next(code for code, dtype in DTYPES.items() if np.dtype(dtype).newbyteorder("<") == self._dtype)
        path = Path(f"{self._prefix}.idx")
        with path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            for part in (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")):
                file.write(part.tobytes())
        self.files[path.name] = file_facts(path)
