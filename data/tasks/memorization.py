"""Generate the entries of a fixed random map from keys to values, which a model has to memorize.

    a b [v]        key number 64 a + b for 64 symbols

Training and test examples are the same. The map holds entries x log2(values) bits, of which a model with a mean loss of
L nats has memorized entries x (log2(values) - L / ln 2); divided by its number of parameters, that is the capacity of
arXiv 2506.01115.
"""

from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt
from pydantic import model_validator as validator

from plumbline.data.indexed import Int64s
from plumbline.data.order import derive_key
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import Example, SplitName, TaskConfig, answering

FIRST_SYMBOL = 1


class MemorizationConfig(TaskConfig):
    """Configure a random map. A key is two symbols, whose ids start at 1; the ids of the values follow."""

    name: Literal["memorization"] = "memorization"
    """Which task."""
    entries: PositiveInt = 4096
    """Keys of the map, each read once per epoch."""
    symbols: PositiveInt = 64
    """Number of symbols at each of the two positions of a key."""
    values: int = Field(default=64, ge=2)
    """Number of values, drawn uniformly."""

    @validator(mode="after")
    def _check(self) -> "MemorizationConfig":
        if self.entries > self.symbols**2:
            raise ValueError(
                f"entries = {self.entries}: {self.symbols} symbols spell {self.symbols**2} keys of two; "
                "raise symbols or lower entries"
            )
        return self

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, symbols and values."""
        return FIRST_SYMBOL + self.symbols + self.values

    @property
    def longest(self) -> int:
        """Return the number of tokens of a key."""
        return 2

    def num_examples(self, split: SplitName) -> int:  # noqa: ARG002 - both splits are the map
        """Return the number of entries of the map, in both splits."""
        return self.entries

    def example(self, split: SplitName, number: int) -> Example:  # noqa: ARG002 - both splits are the map
        """Return entry `number` of the map."""
        value = Draws(derive_key(self.name, self.seed, number)).integers(1, self.values)[0]
        first, second = divmod(number, self.symbols)
        sequence = FIRST_SYMBOL + np.array([first, second, self.symbols + value], np.int64)
        return answering(sequence, np.array([False, False, True]))

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Ask for another key."""
        first, second = (tokens - FIRST_SYMBOL).tolist()
        step = 1 + int(draws.integers(1, max(1, self.entries - 1))[0])
        other = divmod((first * self.symbols + second + step) % self.entries, self.symbols)
        return FIRST_SYMBOL + np.array(other, np.int64)
