"""Generate k-hop induction: look up the token after the last earlier occurrence of a token, k times over.

Let find(i) be the position after the last j < i at which token j equals token i. The answer at position i is the token
at find applied k times to i: the k-hop induction heads of arXiv 2402.09268. One hop is an induction head.
"""

from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt

from plumbline.data.indexed import Int64s
from plumbline.data.streams import IGNORED
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import DrawnTaskConfig, Example

FIRST_SYMBOL = 1


class InductionConfig(DrawnTaskConfig):
    """Configure k-hop induction, asked at every position that has an answer. Tokens from 1 on are the symbols."""

    name: Literal["induction"] = "induction"
    """Which task."""
    hops: PositiveInt = 1
    """How many times to look back (k)."""
    length: int = Field(default=64, ge=2)
    """Tokens of one example."""
    symbols: int = Field(default=16, ge=2)
    """Number of symbols, drawn uniformly. A hop goes back by about this many positions."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding and symbols."""
        return FIRST_SYMBOL + self.symbols

    @property
    def longest(self) -> int:
        """Return the number of tokens of every example."""
        return self.length

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        tokens = FIRST_SYMBOL + draws.integers(self.length, self.symbols)
        following = after_last_occurrence(tokens)
        places = np.arange(self.length)
        for _ in range(self.hops):
            places = np.where(places >= 0, following[places], -1)
        return Example(tokens, np.where(places >= 0, tokens[places], IGNORED))

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Replace all symbols, since the text itself is the question."""
        return FIRST_SYMBOL + draws.integers(len(tokens), self.symbols)


def after_last_occurrence(tokens: Int64s) -> Int64s:
    """Return, for each position [n], the one after the last earlier occurrence of its token, or -1 if there is none."""
    after: dict[int, int] = {}
    following = []
    for place, token in enumerate(tokens.tolist()):
        following.append(after.get(token, -1))
        after[token] = place + 1
    return np.array(following, np.int64)
