"""Generate key-value retrieval: pairs of key and value in context, then keys whose values are asked for.

    k7 v3  k2 v9  k5 v3  ?  k2 [v9]  k7 [v3]

This is the associative recall of arXiv 2506.01115, in which attention that does not look at the tokens fails.
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
    """Most pairs of one example; their number is drawn evenly from 1 to this."""
    queries: PositiveInt = 1
    """Keys asked for, all different; fewer in an example of fewer pairs."""
    keys: PositiveInt = 64
    """Different keys; those of one example are all different."""
    values: int = Field(default=64, ge=2)
    """Different values; several keys of one example may have the same."""

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
        """Return the number of tokens of an example of `pairs` pairs; its last answer is not read."""
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
        """Ask for other keys of the same pairs; of a single pair there is none."""
        asked: Int64s = tokens.copy()
        end = int(np.argmax(tokens == QUERY))
        keys, queries = tokens[:end:2], tokens[end + 1 :: 2]
        places = np.argmax(keys == queries[:, None], axis=1)  # of the keys asked for, in the pairs
        step = 1 + draws.integers(1, max(1, len(keys) - 1))
        asked[end + 1 :: 2] = keys[(places + step) % len(keys)]
        return asked
