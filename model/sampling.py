"""Describe and check sampling without torch, so that a command line is checked before anything is loaded."""

import math
from dataclasses import dataclass

COLDEST = 1e-6
"""The lowest temperature above 0 for which the divided logits are still finite."""


@dataclass(frozen=True)
class Sampling:
    """Describe how a token is drawn from its distribution.

    Raises:
        ValueError: a value is outside its range; names it, its value and the range.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Draw from the k likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability."""

    def __post_init__(self) -> None:
        """Refuse a value outside its range."""
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise ValueError(
                f"temperature = {self.temperature}: 0 is greedy, larger is more random, from {COLDEST} to any finite "
                "number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k}: keep at least 1 token, or leave it out to keep all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: lies in (0, 1]; leave it out to keep all tokens")


GREEDY = Sampling(temperature=0.0)


def check_room(longest: int | None, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a prompt that is empty, or leaves no room for the new tokens in a context of `longest` tokens.

    Raises:
        ValueError: says what does not fit; if `longest` is None, everything does.
    """
    if prompt_tokens == 0:
        raise ValueError("the prompt has no tokens: give at least one (the end-of-text token starts a fresh document)")
    if longest is not None and prompt_tokens + new_tokens > longest:
        raise ValueError(
            f"{prompt_tokens} prompt tokens + {new_tokens} new ones exceed max_position_embeddings = {longest}: "
            "shorten the prompt or ask for fewer tokens"
        )
