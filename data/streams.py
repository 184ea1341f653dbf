"""Define what the loader asks of a source of samples: a text corpus (corpus.py) or a synthetic task (tasks/).

A sample is a window that is read by its number. order.py decides which number comes when, and windows.py makes batches
of the windows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label that PyTorch's cross-entropy leaves out."""


class Window(NamedTuple):
    """Hold one sample before it is padded to the batch's length: n inputs and what to predict after each."""

    inputs: npt.NDArray[np.integer]
    """[n]: what the model reads."""
    labels: npt.NDArray[np.integer]
    """[n]: already shifted; -100 where nothing is to be predicted."""
    begins: npt.NDArray[np.integer]
    """Places in the row, beyond the first, at which a document begins."""


class WindowStream(Protocol):
    """Read one split of a source in windows by number; `read` is a pure function."""

    @property
    def name(self) -> str:
        """Return the name of the split."""

    @property
    def has_answers(self) -> bool:
        """Return whether the labels are the answers of examples, to be scored by exact match."""

    def training_windows(self, length: int) -> int:
        """Return the number of windows of `length` tokens in one epoch. Raises ValueError when there is none."""

    def evaluation_windows(self, length: int) -> int:
        """Return the number of windows that together are the whole split.

        Raises ValueError when there is nothing to predict.
        """

    def read(self, number: int, length: int) -> Window:
        """Read window `number`, of at most `length` tokens."""

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a loss in nats per token as bits per byte of source text; None where there is no text."""


class SampleSource(Protocol):
    """Supply samples, by split; `str(source)` is how messages name it."""

    @property
    def name(self) -> str:
        """Return the label in metrics, unless the configuration gives another."""

    @property
    def fingerprint(self) -> str:
        """Return the identity of the samples: one input of their order, and what a resume compares."""

    @property
    def splits(self) -> Mapping[str, WindowStream]:
        """Return at least "train", and "validation" where something is held out."""

    @property
    def held_out(self) -> WindowStream:
        """Return the split to evaluate on."""

    @property
    def vocab_size(self) -> int | None:
        """Return the number of token ids; None when unknown."""

    @property
    def tokenizer_path(self) -> Path | None:
        """Return the folder of the tokenizer; None where there is none."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """Return the hash of the tokenizer that made the tokens; None where there is none."""
