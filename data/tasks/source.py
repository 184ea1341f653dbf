"""Serve a task to the loader as a source of samples: one example is one window."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from plumbline.data.indexed import Int64s
from plumbline.data.streams import Rows, Window
from plumbline.data.tasks.task import Example, SplitName, TaskConfig
from plumbline.data.tokenizers import tokenizer_sha256

KEPT = 2**19
"""Most examples of a split that is kept in memory: held-out examples and fixed sets are read often."""

KEPT_BYTES = 2**30
"""Most bytes that are kept of a split; of a larger one, the examples that are read first."""

EXAMPLE_BYTES, TOKEN_BYTES = 512, 16
"""Bytes per example besides its tokens, and bytes per token with its label."""


@dataclass(frozen=True)
class TaskStream:
    """Read the examples of one split, each padded to a sample by itself.

    Padding has the label -100 and is a document of its own. In a causal model, no earlier token can see it.
    """

    task: TaskConfig
    name: SplitName
    another_question: bool = False
    """Whether to ask a different question from the one that the labels answer (`TaskConfig.with_another_question`)."""
    has_answers: ClassVar[bool] = True
    _kept: dict[int, Example] = field(default_factory=dict, init=False, repr=False, compare=False)

    def training_windows(self, length: int) -> int:
        """Return the number of examples.

        Raises:
            ValueError: some do not fit into `length` tokens.
        """
        if length < self.task.longest:
            raise ValueError(self.task.too_short(length))
        return self.task.num_examples(self.name)

    def evaluation_windows(self, length: int) -> int:
        """Return the same number as `training_windows`."""
        return self.training_windows(length)

    def read(self, number: int, length: int) -> Window:
        """Read example `number`."""
        tokens, labels = self._example(number)
        return Window(tokens, labels, begins=np.arange(len(tokens), min(len(tokens) + 1, length)))

    def fill(self, rows: Rows, where: Int64s, numbers: Int64s) -> None:
        """Write examples into rows of a batch."""
        for row, number in zip(where.tolist(), numbers.tolist(), strict=True):
            rows.put(row, self.read(number, rows.length))

    def _example(self, number: int) -> Example:
        if number in self._kept:
            return self._kept[number]
        make = self.task.with_another_question if self.another_question else self.task.example
        example = make(self.name, number)
        if len(self._kept) < self._most_kept:
            self._kept[number] = example
        return example

    @cached_property
    def _most_kept(self) -> int:
        if self.task.in_memory or self.task.num_examples(self.name) > KEPT:
            return 0
        return KEPT_BYTES // (EXAMPLE_BYTES + TOKEN_BYTES * self.task.longest)

    def bits_per_byte(self, loss: float) -> None:
        """Return None, since a task has no source text."""


class TaskSource:
    """Supply the samples of a task; a task that is not text has no tokenizer, like a bare Megatron-LM pair."""

    def __init__(self, task: TaskConfig) -> None:
        """Check that there are examples to train on and to hold out.

        Raises:
            ValueError: the task is too small for that, or its file cannot be read.
        """
        self.name = task.name
        self.fingerprint = task.fingerprint
        self.vocab_size = task.vocab_size
        self.tokenizer_path: Path | None = task.tokenizer_folder
        self.tokenizer_sha256 = None if self.tokenizer_path is None else tokenizer_sha256(self.tokenizer_path)
        names: tuple[SplitName, ...] = ("train", "validation") if task.holds_out else ("train",)
        self.splits: Mapping[str, TaskStream] = {name: TaskStream(task, name) for name in names}
        for stream in self.splits.values():
            task.example(stream.name, 0)

    def __str__(self) -> str:
        return f"task {self.name}"

    @property
    def held_out(self) -> TaskStream:
        """Return the examples to evaluate on: those held out, or all if none are."""
        return self.splits.get("validation", self.splits["train"])
