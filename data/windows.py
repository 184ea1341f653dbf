"""From windows, wherever they come from, to the tensors of a batch.

A source of samples is a text corpus (corpus.py) or a task whose examples are computed (tasks/). `SampleSource` and
`WindowStream` say what the loader needs of either: how many windows there are, and window k.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import torch

IGNORED = -100
"""The label that PyTorch's cross-entropy leaves out."""


class Batch(TypedDict):
    """One micro-batch of b samples of T tokens."""

    input_ids: torch.Tensor
    """int64 [b, T]"""
    labels: torch.Tensor
    """int64 [b, T]: the token after each input, already shifted; -100 where there is none."""
    document_ids: torch.Tensor
    """int32 [b, T]: 0, 1, 2, ... within the sample, one more at each document's first token."""
    positions: torch.Tensor
    """int32 [b, T]: distance from the first token of the same document in this sample."""
    sample_index: torch.Tensor
    """int64 [b]: number of the sample in the training order, or of the window in a validation split; -1 in a row that
    only pads the batch."""


class Window(NamedTuple):
    """One sample before it is padded to the batch's length: n inputs and what to predict after each."""

    inputs: npt.NDArray[np.integer]
    """[n]"""
    labels: npt.NDArray[np.integer]
    """[n]: already shifted; -100 where nothing is to be predicted."""
    begins: npt.NDArray[np.integer]
    """Places in the row, beyond the first, at which a document begins."""


class WindowStream(Protocol):
    """Windows by number: one split of a source. `read` is a pure function."""

    @property
    def name(self) -> str:
        """Which split."""

    @property
    def has_answers(self) -> bool:
        """Whether the labels are the answers of examples, to be scored by exact match."""

    def training_windows(self, length: int) -> int:
        """Windows of `length` tokens in one epoch. Raises ValueError when there is none."""

    def evaluation_windows(self, length: int) -> int:
        """Windows that together are the whole split. Raises ValueError when there is nothing to predict."""

    def read(self, number: int, length: int) -> Window:
        """Window `number`, of at most `length` tokens."""

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token as bits per byte of source text; None where there is no text."""


class SampleSource(Protocol):
    """Where samples come from. Its text in messages is `str(source)`."""

    @property
    def name(self) -> str:
        """Label in metrics, unless the configuration gives another."""

    @property
    def fingerprint(self) -> str:
        """Identifies the samples: one input of their order, and what a resume compares."""

    @property
    def splits(self) -> Mapping[str, WindowStream]:
        """At least "train"; "validation" where something is held out."""

    @property
    def held_out(self) -> WindowStream:
        """What to evaluate on."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None when unknown."""

    @property
    def tokenizer_path(self) -> Path | None:
        """Folder of the tokenizer; None where there is none."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """Which tokenizer made the tokens; None where there is none."""


def full_windows(num_tokens: int, length: int) -> int:
    """Windows in which every position has a target; a last shorter one is not counted."""
    return max(0, num_tokens - 1) // length


def all_windows(num_tokens: int, length: int) -> int:
    """Windows that together make every token but the first a target; the last may be shorter than `length`."""
    return -(-max(0, num_tokens - 1) // length)


def gather(windows: Sequence[tuple[WindowStream, int] | None], sample_index: Sequence[int], length: int) -> Batch:
    """Read windows into one batch.

    One slice per row, in a loop: as fast as one fancy index over all tokens at T = 256, twice as fast at 4096, and it
    needs no index array that is four times the size of the tokens.

    Args:
        windows: For each row, a stream and the number of a window in it; None for a row of padding.
        sample_index: For each row, the number to carry along.
        length: Tokens per row (T).
    """
    rows = len(windows)
    inputs = np.zeros((rows, length), np.int64)  # any valid id pads: nothing is ever computed from it
    labels = np.full((rows, length), IGNORED, np.int64)
    begins = np.zeros((rows, length), np.int32)  # 1 where a document begins inside the row
    for row, window in enumerate(windows):
        if window is None:
            continue
        stream, number = window
        sample = stream.read(number, length)
        inputs[row, : len(sample.inputs)] = sample.inputs
        labels[row, : len(sample.labels)] = sample.labels
        begins[row, sample.begins] = 1
    place = np.arange(length, dtype=np.int32)
    last_begin = np.maximum.accumulate(begins * place, axis=1)
    return Batch(
        input_ids=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        document_ids=torch.from_numpy(np.cumsum(begins, axis=1, dtype=np.int32)),
        positions=torch.from_numpy(place - last_begin),
        sample_index=torch.tensor(sample_index, dtype=torch.int64),
    )
