"""Check sampling options without torch, so that a command line is checked before anything is loaded."""

import math

COLDEST = 1e-6
"""The lowest temperature above 0 for which the divided logits are still finite."""


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse a sampling option outside its range.

    Raises:
        ValueError: names it, its value and the range.
    """
    if temperature != 0 and not COLDEST <= temperature < math.inf:
        raise ValueError(
            f"temperature = {temperature}: 0 is greedy, larger is more random, from {COLDEST} to any finite number"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k}: keep at least 1 token, or leave it out to keep all")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: lies in (0, 1]; leave it out to keep all tokens")


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
