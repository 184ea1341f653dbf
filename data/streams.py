"""Define the interface of a source of samples: a text corpus (corpus.py) or a synthetic task (tasks/).

A sample is a window, read by its number. order.py decides which number comes when, and windows.py makes batches of
windows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plumbline.data.boundaries import Int64s
from plumbline.data.memory import Memory

IGNORED = -100
"""The label that PyTorch's cross-entropy ignores."""

BYTES_PER_TOKEN = 24
"""Bytes of a batch per token: inputs and labels take 8 each, documents and positions 4 each."""


class Window(NamedTuple):
    """Hold one sample before it is padded to the batch's length: n inputs and what to predict after each."""

    inputs: npt.NDArray[np.integer]
    """[n]: what the model reads."""
    labels: npt.NDArray[np.integer]
    """[n]: already shifted; -100 where nothing is to be predicted."""
    begins: npt.NDArray[np.integer]
    """Positions in the row, after the first, at which a document begins."""


class Rows:
    """Hold the rows of a batch while streams write windows into them.

    Attributes:
        inputs: int64 [rows, length].
        labels: int64 [rows, length].
        documents: int32 [rows, length].
        positions: int32 [rows, length].
        begins: arrays of positions, counted through all rows, at which documents begin within a row.
    """

    def __init__(self, rows: int, length: int, memory: Memory | None = None) -> None:
        """Allocate memory, or borrow it from `memory`."""
        size = BYTES_PER_TOKEN * rows * length
        lent = memory.lend(size) if memory else np.empty(size, np.uint8)
        wide, narrow = np.split(lent, [16 * rows * length])
        self.inputs, self.labels = wide.view(np.int64).reshape(2, rows, length)
        self.documents, self.positions = narrow.view(np.int32).reshape(2, rows, length)
        self.begins: list[Int64s] = []

    @property
    def length(self) -> int:
        """Return the tokens of one row."""
        return int(self.inputs.shape[1])

    def put(self, row: int, window: Window) -> None:
        """Write one window into a row, and pad the rest."""
        filled = len(window.inputs)
        self.inputs[row, :filled] = window.inputs
        self.labels[row, :filled] = window.labels
        self.begins.append(row * self.length + np.asarray(window.begins, np.int64))
        self.pad(row, filled)

    def pad(self, row: int, start: int = 0) -> None:
        """Pad a row from `start` on."""
        self.inputs[row, start:] = 0  # any valid id will do: nothing is ever computed from padding
        self.labels[row, start:] = IGNORED


class WindowStream(Protocol):
    """Read one split of a source as numbered windows; `read` is a pure function."""

    @property
    def name(self) -> str:
        """Return the name of the split."""

    @property
    def has_answers(self) -> bool:
        """Return whether the labels are the answers of examples, to be scored by exact match."""

    def training_windows(self, length: int) -> int:
        """Return the number of windows of `length` tokens in one epoch. Raises ValueError if there is none."""

    def evaluation_windows(self, length: int) -> int:
        """Return the number of windows that together cover the whole split.

        Raises ValueError if there is nothing to predict.
        """

    def read(self, number: int, length: int) -> Window:
        """Read window `number`, of at most `length` tokens."""

    def fill(self, rows: Rows, where: Int64s, numbers: Int64s) -> None:
        """Write windows into rows of a batch, one for each of `numbers`: the same as `read`, but faster."""

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a loss in nats per token as bits per byte of source text, or None if there is no text."""


class SampleSource(Protocol):
    """Supply samples by split; `str(source)` is its name in messages."""

    @property
    def name(self) -> str:
        """Return the label in metrics, unless the configuration gives another."""

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies the samples, on which their order depends and which a resume compares."""

    @property
    def splits(self) -> Mapping[str, WindowStream]:
        """Return the splits: "train" (trained on), "validation" (held out), or both."""

    @property
    def held_out(self) -> WindowStream:
        """Return the split to evaluate on."""

    @property
    def vocab_size(self) -> int | None:
        """Return the number of token ids, or None if unknown."""

    @property
    def tokenizer_path(self) -> Path | None:
        """Return the folder of the tokenizer, or None if there is none."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """Return the hash of the tokenizer that made the tokens, or None if there is none."""


def training_split(source: SampleSource) -> WindowStream:
    """Return the split to train on.

    Raises:
        ValueError: all of the source is held out.
    """
    split = source.splits.get("train")
    if split is None:
        raise ValueError(
            f"{source}: was prepared with --validation-fraction 1, so all of it is held out and nothing can train on "
            "it; list it under data.validation, or prepare the text again with a smaller fraction"
        )
    return split
