"""Read files of nothing but token ids, as other trainers keep them.

    nanoGPT                 train.bin: ids end to end, uint16 (or uint32, for larger vocabularies)
    llm.c, modded-nanogpt   *.bin: a header of 256 int32 (magic, version, number of ids), then the ids
    build-nanogpt           *.npy: one array of numpy

None of them says which tokenizer made the ids. Documents are told apart by the end-of-text token alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from plumbline.data.damage import reading
from plumbline.data.indexed import Int64s, Integers

LLM_C = (20240520, 1)
"""Magic and version of the header before ids in uint16."""
HEADER_BYTES = 256 * 4
NUMPY = b"\x93NUMPY"
LOOKED_AT = 1 << 20
"""Ids of a file without header that are looked at to tell uint32 from uint16."""
AT_ONCE = 1 << 22
"""Ids that are read at a time."""
LONGEST = 1 << 28
"""Ids after which a document without end is taken for one of another tokenizer."""


def open_tokens(path: Path, vocab_size: int) -> Integers:
    """Map the ids of a file into memory, [num_tokens].

    Args:
        path: the file.
        vocab_size: number of ids of the tokenizer; decides the type of a file that does not state it.

    Raises:
        ValueError: it is not of a known format, or truncated.
    """
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        raise ValueError(
            f"{path}: belongs to a Megatron-LM pair, which trains as it is: "
            f"'data.train=[{{path: {path.with_suffix('')}}}]'"
        )
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if head.startswith(NUMPY):
        with reading(path):
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(f"{path}: {found.dtype} {list(found.shape)}; expected one row of whole numbers")
        return np.asarray(found)
    *kind, ids = np.frombuffer(head[:12], "<i4").tolist() if len(head) == HEADER_BYTES else (0, 0)
    if tuple(kind) != LLM_C:
        return np.asarray(np.memmap(path, _without_header(path, vocab_size), mode="r"))
    if ids < 1 or path.stat().st_size != HEADER_BYTES + 2 * ids:
        raise ValueError(
            f"{path}: {path.stat().st_size:,} bytes, but its header states {ids:,} ids of 2 bytes after "
            f"{HEADER_BYTES:,}; it is truncated: copy it again"
        )
    return np.asarray(np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES))


def _without_header(path: Path, vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the type of the ids of a file that does not state it."""
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ValueError(f"{path}: {size:,} bytes; expected ids of 2 or 4 bytes each")
    # Every second half of a uint32 below 65,536 is zero, and no text has a token 0 at every second place
    halves = np.memmap(path, "<u2", mode="r", shape=(min(size // 2, 2 * LOOKED_AT),))
    wide = vocab_size > 65536 or (size >= 8 and not halves[1::2].any())
    if wide and size % 4:
        raise ValueError(f"{path}: {size:,} bytes; expected ids of 4 bytes each for {vocab_size:,} token ids")
    return np.dtype("<u4" if wide else "<u2")


def parts(paths: Sequence[Path], vocab_size: int) -> Iterator[Integers]:
    """Yield the ids of files end to end, some at a time.

    Raises:
        ValueError: an id is not one of the tokenizer; the message names file and place.
    """
    for path in paths:
        tokens = open_tokens(path, vocab_size)
        for start in range(0, len(tokens), AT_ONCE):
            part = tokens[start : start + AT_ONCE]
            wrong = np.flatnonzero((part < 0) | (part >= vocab_size))
            if wrong.size:
                place = int(wrong[0])
                raise ValueError(
                    f"{path}: id {part[place]} at place {start + place:,}, and the tokenizer has ids 0 to "
                    f"{vocab_size - 1}; give --tokenizer the one that made the file"
                )
            is_uint64 = part.dtype.kind == "u" and part.itemsize == 8  # numpy joins these with others to floats
            yield part.astype(np.int64) if is_uint64 else part


def documents(paths: Sequence[Path], vocab_size: int, eos_token_id: int) -> Iterator[tuple[Integers, Int64s]]:
    """Yield the whole documents of files that are read end to end, some at a time.

    A document goes as far as the next end-of-text token, over the ends of files; the last one may lack it.

    Yields:
        The ids of the documents, concatenated, and the length of each.

    Raises:
        ValueError: as for `parts`, or no document ends.
    """
    rest: list[Integers] = []  # the beginning of a document
    for part in parts(paths, vocab_size):
        ends = np.flatnonzero(part == eos_token_id) + 1
        before = sum(map(len, rest))
        if not ends.size:
            if before + len(part) > LONGEST:
                raise ValueError(
                    f"{paths[-1]}: {before + len(part):,} ids up to here without the end-of-text token {eos_token_id}; "
                    "give --tokenizer the one that made the files"
                )
            rest.append(part)
            continue
        yield np.concatenate([*rest, part[: ends[-1]]]), np.diff(ends + before, prepend=0)
        rest = [part[ends[-1] :]]
    if last := sum(map(len, rest)):
        yield np.concatenate(rest), np.array([last])
