"""Cache the packed windows of a corpus in files, made once by the first process, and read samples through them.

They lie in `$PLUMBLINE_CACHE` (default: ~/.cache/plumbline), since a corpus may be read-only. The folder
`packing/FINGERPRINT-LENGTH` holds the start of each piece (int64) and its number of inputs (int32), window after
window, and the first piece of each window (int64): 12 bytes per piece and 8 per window. All are memory-mapped for
random access.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plumbline.data.corpus import Split
from plumbline.data.disk import look_again, naming_full_disk
from plumbline.data.indexed import Int64s
from plumbline.data.locks import wait_for
from plumbline.data.packing import packed_blocks
from plumbline.data.paths import user_cache
from plumbline.data.remote.fetch import RemoteError
from plumbline.data.remote.piece import Piece
from plumbline.data.shards import remote_pieces_of
from plumbline.data.streams import Rows, Window
from plumbline.data.workspace import FolderKind, new_folder

LOG = logging.getLogger(__name__)
PLACE = "PLUMBLINE_CACHE"
"""Variable that says where packed windows lie."""
ELSEWHERE = f"set {PLACE} to a folder on another device"
FACTS = "packing.json"
FILES: dict[str, np.dtype[Any]] = {"starts": np.dtype("<i8"), "lengths": np.dtype("<i4"), "windows": np.dtype("<i8")}
KIND = FolderKind("a folder of packed windows", marks=(FACTS,), others=tuple(FILES))
VERSION = 1  # of the file format and of the packing


@dataclass(frozen=True)
class Facts:
    """Summarise a packing."""

    version: int
    length: int
    """Tokens of one window."""
    tokens: int
    """Tokens of the stream."""
    windows: int
    pieces: int
    documents: int
    """Documents with at least one token to predict."""
    cut: int
    """Documents longer than a window."""

    @property
    def padding(self) -> float:
        """Return the fraction of padding in the windows."""
        return 1 - (self.tokens - 1) / (self.windows * self.length)

    def __str__(self) -> str:
        return (
            f"{self.windows:,} windows, {self.padding:.2%} padding, {self.cut:,} of {self.documents:,} documents are "
            "longer than a window and cut"
        )


@dataclass(frozen=True)
class PackedSplit:
    """Read a training split in windows of one length, packed by best fit."""

    split: Split
    facts: Facts
    starts: Int64s
    """[pieces]: the token that each piece begins with, window after window."""
    lengths: npt.NDArray[np.int32]
    """[pieces]: number of inputs of each piece."""
    windows: Int64s
    """[windows + 1]: the first piece of each window, and the number of pieces."""
    has_answers = False

    @property
    def name(self) -> str:
        """Return the name of the split."""
        return self.split.name

    def training_windows(self, length: int) -> int:
        """Return the number of windows."""
        assert length == self.facts.length
        return self.facts.windows

    def evaluation_windows(self, length: int) -> int:
        """Return the same number as `training_windows`, since nothing is left out."""
        return self.training_windows(length)

    def read(self, number: int, length: int) -> Window:
        """Read window `number`."""
        rows = Rows(1, length)
        self.fill(rows, np.zeros(1, np.int64), np.array([number]))
        return Window(rows.inputs[0], rows.labels[0], np.concatenate(rows.begins))

    def fill(self, rows: Rows, where: Int64s, numbers: Int64s) -> None:
        """Write windows into rows of a batch; padding is a document of its own."""
        length = rows.length
        first = self.windows[numbers]
        pieces = self.windows[numbers + 1] - first
        row = np.repeat(np.arange(len(numbers)), pieces)
        piece = np.arange(len(row)) + (first - np.cumsum(pieces) + pieces)[row]
        sizes = self.lengths[piece].astype(np.int64)
        ends = np.cumsum(sizes)
        filled = np.bincount(row, sizes, len(numbers)).astype(np.int64)
        stops = np.cumsum(filled)
        column = ends - sizes - (stops - filled)[row]
        starts = self.starts[piece]
        tokens = self.split.indexed.read_all(starts, sizes)
        padded = np.flatnonzero(filled < length)
        after = self.split.indexed.read_all(starts + sizes, np.ones_like(sizes))
        # In the dtype on disk, widened for all rows at once; `after` may come from a shard with a wider dtype
        inputs = np.zeros((len(numbers), length), np.result_type(tokens, after))
        labels = np.empty_like(inputs)
        for first, its in zip([0, *(padded + 1).tolist()], np.split(tokens, stops[padded]), strict=True):
            inputs.reshape(-1)[first * length : first * length + len(its)] = its
        labels.reshape(-1)[:-1] = inputs.reshape(-1)[1:]
        labels[row, column + sizes - 1] = after
        rows.inputs[where], rows.labels[where] = inputs, labels
        for number in padded.tolist():
            rows.pad(int(where[number]), int(filled[number]))
        rows.begins += [(where[row] * length + column)[column > 0], where[padded] * length + filled[padded]]

    def windows_with(self, first: int, stop: int) -> list[int]:
        """Return the windows that hold any of the tokens [first, stop) as input; scans all pieces."""
        pieces = np.flatnonzero((self.starts < stop) & (self.starts + self.lengths > first))
        found: list[int] = np.unique(np.searchsorted(self.windows, pieces, side="right") - 1).tolist()
        return found

    def remote_pieces(self, number: int, length: int) -> list[Piece]:
        """Return the pieces to fetch before window `number` can be read, in order; none for a local corpus."""
        assert length == self.facts.length
        its = slice(int(self.windows[number]), int(self.windows[number + 1]))
        spans = zip(self.starts[its].tolist(), self.lengths[its].tolist(), strict=True)
        return [
            piece for start, size in spans for piece in remote_pieces_of(self.split.indexed, start, start + size + 1)
        ]

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a loss in nats per token as bits per byte of source text, or None if the bytes are unknown."""
        return self.split.bits_per_byte(loss)


def open_packed(split: Split, fingerprint: str, length: int) -> PackedSplit:
    """Open the packed windows of a corpus's training split; the first process of a node makes them if they are missing.

    Raises:
        ValueError: the split has nothing to predict, or the windows cannot be written: their disk has no room for them,
            or no locks, without which all processes would write them.
    """
    if split.num_tokens < 2:
        raise ValueError(f"{split.indexed}: {split.num_tokens} tokens leave nothing to predict")
    folder = cache_folder() / "packing" / f"{fingerprint}-{length}"
    # Looked for before the lock is taken as well, for which all processes of a run would queue at each start
    facts = _read_facts(folder) or _make_once(split, length, folder)
    return PackedSplit(split, facts, **{name: _map(folder / name) for name in FILES})


def cache_folder() -> Path:
    """Return the folder for files that can be recomputed."""
    return Path(os.environ.get(PLACE) or user_cache())


def _make_once(split: Split, length: int, folder: Path) -> Facts:
    """Return what the first process has packed that comes here."""
    try:
        with _locked(folder.with_suffix(".lock")):
            look_again(folder.parent)
            return _read_facts(folder) or _make(split, length, folder)
    except RemoteError:  # an index that cannot be fetched
        raise
    except OSError as error:
        if error.errno is None:  # one of our own, which says what to do
            raise ValueError(str(error)) from error
        raise ValueError(f"{folder}: {error}; set {PLACE} to a folder that can be written to") from error


def _check_space(split: Split, length: int, folder: Path) -> None:
    """Refuse early what cannot fit: a piece for each document and for each window, or more.

    Raises:
        ValueError: says how much is needed, and how much there is.
    """
    windows = -(-(split.num_tokens - 1) // length)
    piece = FILES["starts"].itemsize + FILES["lengths"].itemsize
    needed = max(split.num_documents, windows) * piece + windows * FILES["windows"].itemsize
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ValueError(
            f"{folder}: packed windows need about {needed / 1e6:,.1f} MB and the device has {free / 1e6:,.1f} MB free; "
            f"free some space, or {ELSEWHERE}"
        )


def _make(split: Split, length: int, folder: Path) -> Facts:
    _check_space(split, length, folder)
    LOG.info(f"packing {split.num_tokens:,} tokens of {split.indexed} into windows of {length}")
    windows = pieces = documents = cut = 0
    with naming_full_disk(folder, ELSEWHERE), new_folder(folder, KIND) as partial, contextlib.ExitStack() as files:
        write = {name: files.enter_context((partial / name).open("wb")) for name in FILES}
        for block in packed_blocks(split.indexed, length):
            first = pieces + np.cumsum(block.counts) - block.counts
            for name, values in (("starts", block.starts), ("lengths", block.lengths), ("windows", first)):
                write[name].write(values.astype(FILES[name]).tobytes())
            windows, pieces = windows + len(block.counts), pieces + len(block.starts)
            documents, cut = documents + block.documents, cut + block.cut
        write["windows"].write(np.array([pieces], FILES["windows"]).tobytes())
        files.close()
        facts = Facts(VERSION, length, split.num_tokens, windows, pieces, documents, cut)
        (partial / FACTS).write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")
    return facts


def _read_facts(folder: Path) -> Facts | None:
    """Return the facts of a folder, or None if it is missing or its files do not have the sizes stated there."""
    try:
        facts = Facts(**json.loads((folder / FACTS).read_text(encoding="utf-8")))
        counts = {"starts": facts.pieces, "lengths": facts.pieces, "windows": facts.windows + 1}
        whole = all((folder / name).stat().st_size == counts[name] * dtype.itemsize for name, dtype in FILES.items())
    except (OSError, ValueError, TypeError):
        return None
    return facts if whole and facts.version == VERSION else None


def _map(path: Path) -> npt.NDArray[Any]:
    return np.asarray(np.memmap(path, dtype=FILES[path.name], mode="r"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        wait_for(file, PLACE, cache_folder())
        yield
