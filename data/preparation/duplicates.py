"""Find documents that repeat an earlier one, exactly or nearly.

exact   The same after normalisation: Unicode's form NFC, each run of white space one space, none at the ends. Texts are
        compared by 64-bit hashes: among a billion documents, the chance of any false match is three in a hundred.
near    Likely to share most runs of five words: MinHash signatures of 112 numbers in 14 bands of 8, as FineWeb has
        them (Penedo et al., 2024). A document is dropped if any band of its signature equals that of an earlier one,
        which happens for 5 % of pairs that share half of their runs, 77 % of those that share three quarters, and 99 %
        of those that share 86 %.

The first document of each set of duplicates stays, in the order of the sources. A document of more than
`long_text.PART_BYTES` is compared by its bytes, without normalisation.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from plumbline.data.heldout import UInt64s
from plumbline.data.preparation.available import available_bytes
from plumbline.data.preparation.long_text import PART_BYTES

BANDS, ROWS, WORDS = 14, 8, 5
SORTED = 50  # bytes for each document while the hashes of one column are sorted
SHINGLES_AT_ONCE = 4096  # bounds memory: each takes 112 numbers of 8 bytes
WORD = re.compile(r"\w+")


def check_mode(mode: str | None) -> None:
    """Refuse near-duplicate search if the library that it needs is missing.

    Raises:
        ValueError: names what to install.
    """
    if mode == "near":
        try:
            _empty_signature()
        except ImportError as error:
            raise ValueError("--deduplicate near: needs the package datasketch; pip install -e '.[dedup]'") from error


def check_memory(documents: int, mode: str) -> None:
    """Refuse to look for duplicates among more documents than there is memory for.

    Raises:
        ValueError: says how much is needed, and how much there is.
    """
    needed, available = documents * SORTED, available_bytes()
    if needed > available:
        raise ValueError(
            f"--deduplicate {mode}: {documents:,} documents need about {needed / 1e9:,.1f} GB of memory at once, and "
            f"{available / 1e9:,.1f} GB are available; give the command more (under Slurm: --mem), prepare parts of "
            "the text and --merge them, which leaves duplicates of other parts, or leave --deduplicate out"
        )


def key_count(mode: str | None) -> int:
    """Return the number of hashes per document."""
    return {"exact": 1, "near": BANDS}.get(mode or "", 0)


def keys_of(text: str, data: bytes, mode: str | None) -> list[int]:
    """Return a document's hashes: it is a duplicate if any equals the hash of an earlier one in the same column.

    Args:
        text: The document.
        data: Its bytes.
        mode: "exact", "near", or None for no hash.
    """
    if len(data) > PART_BYTES:
        return keys_of_long_text(xxhash.xxh3_64_intdigest(data), mode)
    if mode == "exact":
        return [xxhash.xxh3_64_intdigest(normalised(text).encode())]
    return _bands(normalised(text)) if mode == "near" else []


def keys_of_long_text(digest: int, mode: str | None) -> list[int]:
    """Return the hashes of a document too long to be normalised at once, given the hash of its bytes."""
    return [digest] * key_count(mode)


def normalised(text: str) -> str:
    """Return a text without insignificant differences of Unicode form and white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _bands(text: str) -> list[int]:
    words = [word.encode() for word in WORD.findall(text.lower())]
    if not words:
        return [xxhash.xxh3_64_intdigest(text.encode())] * BANDS
    shingles = [b" ".join(words[first : first + WORDS]) for first in range(max(1, len(words) - WORDS + 1))]
    signature = _empty_signature().copy()
    for first in range(0, len(shingles), SHINGLES_AT_ONCE):
        signature.update_batch(shingles[first : first + SHINGLES_AT_ONCE])
    return [xxhash.xxh3_64_intdigest(band.tobytes()) for band in signature.hashvalues.reshape(BANDS, ROWS)]


@lru_cache(maxsize=1)
def _empty_signature() -> Any:
    from datasketch import MinHash  # an optional dependency, only needed here

    return MinHash(BANDS * ROWS, seed=1, hashfunc=xxhash.xxh3_64_intdigest, scheme="affine64")


def first_ones(column: Callable[[int], Iterable[UInt64s]], columns: int) -> npt.NDArray[np.bool_]:
    """Return a flag for each document: whether it shares no hash with an earlier document.

    Args:
        column: Yields the hashes of one column in blocks, in the order of the documents.
        columns: Number of columns.
    """
    kept: npt.NDArray[np.bool_] | None = None
    for number in range(columns):
        hashes = np.concatenate([np.empty(0, np.uint64), *column(number)])
        first = np.zeros(len(hashes), np.bool_)
        first[np.unique(hashes, return_index=True)[1]] = True
        kept = first if kept is None else kept & first
    return np.empty(0, np.bool_) if kept is None else kept
