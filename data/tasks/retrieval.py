"""Generate key-value retrieval: pairs of key and value, then keys whose values are asked for.

    k7 v3  k2 v9  k5 v3  ?  k2 [v9]  k7 [v3]

This is the associative recall of arXiv 2506.01115, which attention that ignores the tokens cannot solve.
"""

from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt
from pydantic import model_validator as validator

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import DrawnTaskConfig, Example, answering

QUERY = 1
FIRST_KEY = 2


class RetrievalConfig(DrawnTaskConfig):
    """Configure key-value retrieval. Token 1 ends the pairs; the ids of the keys follow, then those of the values."""

    name: Literal["retrieval"] = "retrieval"
    """Which task."""
    pairs: PositiveInt = 16
    """Most pairs of one example; their number is drawn uniformly from 1 to this."""
    queries: PositiveInt = 1
    """Number of distinct keys asked for; fewer in an example with fewer pairs."""
    keys: PositiveInt = 64
    """Number of keys; those of one example are distinct."""
    values: int = Field(default=64, ge=2)
    """Number of values; keys of one example may share a value."""

    @validator(mode="after")
    def _check(self) -> "RetrievalConfig":
        if self.pairs > self.keys:
            raise ValueError(f"pairs = {self.pairs} exceeds keys = {self.keys}: the keys of an example all differ")
        if self.queries > self.pairs:
            raise ValueError(f"queries = {self.queries} exceeds pairs = {self.pairs}: the keys asked for all differ")
        return self

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, the end of the pairs, keys and values."""
        return FIRST_KEY + self.keys + self.values

    @property
    def longest(self) -> int:
        """Return the number of input tokens of an example with `pairs` pairs; its last answer is not an input."""
        return 2 * self.pairs + 1 + 2 * self.queries - 1

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        count = 1 + int(draws.integers(1, self.pairs)[0])
        keys = FIRST_KEY + draws.distinct(count, self.keys)
        values = FIRST_KEY + self.keys + draws.integers(count, self.values)
        pairs = np.stack((keys, values), axis=1)  # (count, 2)
        asked = pairs[draws.distinct(min(self.queries, count), count)]
        sequence = np.concatenate((pairs.reshape(-1), [QUERY], asked.reshape(-1)))
        is_answer = np.zeros(len(sequence), np.bool_)
        is_answer[pairs.size + 2 :: 2] = True
        return answering(sequence, is_answer)

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Ask for other keys of the same pairs; with a single pair there are none."""
        asked: Int64s = tokens.copy()
        end = int(np.argmax(tokens == QUERY))
        keys, queries = tokens[:end:2], tokens[end + 1 :: 2]
        places = np.argmax(keys == queries[:, None], axis=1)  # positions of the queried keys among the pairs
        step = 1 + draws.integers(1, max(1, len(keys) - 1))
        asked[end + 1 :: 2] = keys[(places + step) % len(keys)]
        return asked
