"""What a source of samples is: a text corpus (corpus.py) or a task whose examples are computed (tasks/).

Training reads windows by number. Which number comes when is the matter of order.py, what becomes of them of windows.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label that PyTorch's cross-entropy leaves out."""


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
