"""Define a task: examples by number, each a pure function of the task's configuration, the split and the number.

There is no state, so example 10^12 costs the same as example 0, and ranks and interruptions do not matter. A task is
determined by its configuration, including its seed, as a corpus is by its files; `run.seed` decides the order of
examples.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
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
"""Number of drawn training examples, which no run exhausts."""

HELD_OUT_EXAMPLES = 4096
"""Number of drawn held-out examples, all of which are scored if train.eval_batches is null."""

HELD_OUT_SHARE = 16
"""One in this many distinct examples is held out."""

ATTEMPTS = 2**14
"""Draws before a split counts as empty: if one draw in a thousand fits, that is wrong once in 10^7 times."""


class Example(NamedTuple):
    """Hold one example of n tokens, with at least one answer."""

    tokens: Int64s
    """[n]: what the model reads."""
    labels: Int64s
    """[n]: the answer expected after each token, or -100 if there is none."""


class OwnScore(NamedTuple):
    """Describe a score that only some tasks have: a mean over held-out examples."""

    key: str
    """The end of its key in metrics.jsonl, eval/NAME/KEY."""
    words: str
    """How a line of output goes on after the scores of every task, with a field for the mean."""
    is_of_answers: bool
    """Whether it depends on what a model answers, so that it is another one with thoughts."""

    @property
    def is_share(self) -> bool:
        """Return whether it is a share, which people read in percent."""
        return "%}" in self.words


class OwnScores(NamedTuple):
    """Hold the scores that only some tasks have, and how an example is judged."""

    scores: tuple[OwnScore, ...]
    longest_answer: int
    """Tokens that a model answers with at most."""
    judge: Callable[[int, Sequence[int], Sequence[int]], Sequence[float]]
    """Takes the number of a held-out example, a model's greedily decoded answer and the right one; returns a value for
    each score, or nan where the task lacks it."""


class TaskConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure a task. Token 0 is padding, and occurs only in examples that are text."""

    name: str
    """Which task."""
    seed: NonNegativeInt = 0
    """Selects the examples; different seeds give different tasks of one kind."""

    holds_out: ClassVar[bool] = True
    """Whether some examples are held out for evaluation; if not, all serve for both training and evaluation."""

    in_memory: ClassVar[bool] = False
    """Whether its examples are in memory anyway, so that they need not be kept when they are read."""

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
        """Return the folder of its tokenizer, or None if the tokens are not text."""
        return None

    def too_short(self, length: int) -> str:
        """Return why samples of `length` tokens are too short for the longest example."""
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

    @property
    def own_scores(self) -> OwnScores | None:
        """Return the scores of held-out examples that other tasks lack, or None if there are none."""
        return None

    @abstractmethod
    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Return the tokens [n] of an example with a different random question about the same content.

        Answers among the inputs stay unchanged. If there is nothing else to ask, the question stays, too.
        """

    def with_another_question(self, split: SplitName, number: int) -> Example:
        """Return example `number` with its own labels but another question, to which its labels are not the answer."""
        tokens, labels = self.example(split, number)
        draws = Draws(derive_key("another question", self.name, self.seed, split, number))
        return Example(self.ask_otherwise(tokens, draws), labels)

    @property
    def fingerprint(self) -> str:
        """Return sixteen hex digits that hash the configuration, which determines every example.

        Keys that are None are left out, so that a new optional key does not change existing hashes.
        """
        return f"{derive_key(self.model_dump(exclude_none=True)):016x}"


class DrawnTaskConfig(TaskConfig):
    """Configure a task whose examples are drawn at random, more than can be stored.

    A hash of an example decides whether it is held out, independently of the seed. Draws from the other split are
    rejected, so no example is ever in both.
    """

    examples: PositiveInt | None = None
    """Number of training examples, all read once per epoch; null: endless new ones."""

    @abstractmethod
    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""

    def num_examples(self, split: SplitName) -> int:
        """Return the number of examples of a split, which are numbered from 0."""
        return HELD_OUT_EXAMPLES if split == "validation" else self.examples or TRAIN_EXAMPLES

    def candidates(self, split: SplitName, number: int) -> Iterator[Example]:
        """Yield draws for example `number`; the first that belongs to the split is used."""
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
    """Return whether an example belongs to the held-out split, judged by its tokens."""
    return derive_key("held out", example.tokens.astype("<i8").tobytes()) % HELD_OUT_SHARE == 0


def answering(sequence: Int64s, is_answer: npt.NDArray[np.bool_]) -> Example:
    """Return the example that predicts the tokens of `sequence` [n + 1] marked in `is_answer` [n + 1]."""
    return Example(sequence[:-1], np.where(is_answer, sequence, IGNORED)[1:])
