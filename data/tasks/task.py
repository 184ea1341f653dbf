"""Define a task: examples by number, each a pure function of the task's configuration, the split and the number.

There is no state, so example 10^12 costs what example 0 costs, and neither ranks nor interruptions appear. A task is
fixed by its configuration, its seed included, as a corpus is by its files; `run.seed` decides the order of examples.
"""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from plumbline.data.indexed import Int64s
from plumbline.data.order import derive_key
from plumbline.data.streams import IGNORED
from plumbline.data.tasks.draws import Draws

SplitName = Literal["train", "validation"]

TRAIN_EXAMPLES = 2**40
"""Numbers of drawn training examples; a run never comes to their end."""

HELD_OUT_EXAMPLES = 4096
"""Drawn examples of the held-out split, all of which are scored when train.eval_batches is null."""

HELD_OUT_SHARE = 16
"""One in so many different examples is held out."""

ATTEMPTS = 2**14
"""Draws before a split counts as empty: an example of a thousandth of the draws is missed once in 10^7 times."""


class Example(NamedTuple):
    """Hold one example of n tokens, with at least one answer."""

    tokens: Int64s
    """[n]: what the model reads."""
    labels: Int64s
    """[n]: the answer expected after each token; -100 where there is none."""


class TaskConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Configure a task. Token 0 is padding, and part of no example that is not text."""

    name: str
    """Which task."""
    seed: NonNegativeInt = 0
    """Which examples; tasks of different seeds are different tasks of one kind."""

    holds_out: ClassVar[bool] = True
    """Whether it has examples to be evaluated on beside those to train on; without, all are for either."""

    in_memory: ClassVar[bool] = False
    """Whether its examples lie in memory by themselves, so that nobody need keep those that were read."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the number of token ids."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Return the number of tokens of the longest example."""

    @property
    def tokenizer_folder(self) -> Path | None:
        """Return the folder of the tokenizer of its texts; None where the tokens are no text."""
        return None

    def too_short(self, length: int) -> str:
        """Say why samples of `length` tokens are too short for the longest example."""
        return (
            f"data.sequence_length {length} is too short for task {self.name}, whose longest example has "
            f"{self.longest} tokens; set it to {self.longest} or more, or make the task smaller"
        )

    @abstractmethod
    def num_examples(self, split: SplitName) -> int:
        """Return the number of examples of a split, which are numbered from 0."""

    @abstractmethod
    def example(self, split: SplitName, number: int) -> Example:
        """Return example `number` of a split. Raises ValueError when the task has no example for this split."""

    @abstractmethod
    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Return the tokens [n] of an example, asked another random question about the same things.

        Answers that are read stay what they are. Where there is nothing else to ask, the question stays, too.
        """

    def with_another_question(self, split: SplitName, number: int) -> Example:
        """Return example `number` with its own labels and another question: what is right then was not read from it."""
        tokens, labels = self.example(split, number)
        draws = Draws(derive_key("another question", self.name, self.seed, split, number))
        return Example(self.ask_otherwise(tokens, draws), labels)

    @property
    def fingerprint(self) -> str:
        """Return sixteen hex digits: a hash of the configuration, and so of every example.

        Keys that are None are left out, so that a task keeps its hash when it gets one more of them.
        """
        return f"{derive_key(self.model_dump(exclude_none=True)):016x}"


class DrawnTaskConfig(TaskConfig):
    """Configure a task whose examples are drawn at random, more than can be stored.

    A hash of an example decides whether it is held out, for every seed alike. Draws that fall into the other split are
    drawn again, so no example is ever in both.
    """

    examples: PositiveInt | None = None
    """Training examples, all of which are read once an epoch; null: new ones without end."""

    @abstractmethod
    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""

    def num_examples(self, split: SplitName) -> int:
        """Return the number of examples of a split, which are numbered from 0."""
        return HELD_OUT_EXAMPLES if split == "validation" else self.examples or TRAIN_EXAMPLES

    def candidates(self, split: SplitName, number: int) -> Iterator[Example]:
        """Yield draws for example `number`, of which the first that belongs to the split is taken."""
        for attempt in range(ATTEMPTS):
            yield self.draw(Draws(derive_key(self.name, self.seed, split, number, attempt)))

    def example(self, split: SplitName, number: int) -> Example:
        """Return example `number` of a split.

        Raises:
            ValueError: no draw gave an example of this split that has an answer.
        """
        for example in self.candidates(split, number):
            has_answer = bool((example.labels != IGNORED).any())
            if has_answer and is_held_out(example) == (split == "validation"):
                return example
        raise ValueError(
            f"task {self.name}: {ATTEMPTS} draws gave no {split} example with an answer; make the task larger: it has "
            f"too few different examples to hold out one in {HELD_OUT_SHARE}, or too short ones for an answer"
        )


def is_held_out(example: Example) -> bool:
    """Return whether an example belongs to the held-out split, by its tokens alone."""
    return derive_key("held out", example.tokens.astype("<i8").tobytes()) % HELD_OUT_SHARE == 0


def answering(sequence: Int64s, is_answer: npt.NDArray[np.bool_]) -> Example:
    """Return the example in which the tokens of `sequence` [n + 1] marked in `is_answer` [n + 1] are predicted."""
    return Example(sequence[:-1], np.where(is_answer, sequence, IGNORED)[1:])
