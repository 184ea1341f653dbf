"""Sample autoregressively with a KV cache, through the same forward pass that trains (multipliers included)."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plumbline.model.decoder import CausalLM
from plumbline.model.sampling import Sampling

Reader = Callable[[Tensor], Tensor]
"""Reads the next tokens [B, T] of each row, after all that it has read before; returns the next-token logits [B, V]."""
INVALID = -1
OVERFLOWS = "the logits of the next token are nan or inf: the model overflows; try --dtype fp32"


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Draw one token id [B] for each row of logits [B, V].

    Raises:
        ValueError: the logits do not form a distribution.
    """
    drawn = _draw(logits, sampling, generator)
    if (drawn == INVALID).any():
        raise ValueError(OVERFLOWS)
    return drawn


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Draw as `sample_token` does, but without waiting for the device: INVALID where there is no distribution."""
    valid = logits.logsumexp(-1).isfinite()
    if sampling.temperature == 0.0:
        return torch.where(valid, logits.argmax(-1), INVALID)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        cutoff = logits.topk(min(sampling.top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < cutoff, -torch.inf)
    if sampling.top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all likelier tokens
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    # As torch.multinomial draws one token, which reads on the host whether the probabilities are valid
    probabilities = logits.softmax(-1)
    races = torch.empty_like(probabilities).exponential_(1, generator=generator)
    return torch.where(valid, (probabilities / races).argmax(-1), INVALID)


def cached_reader(model: CausalLM, rows: int, capacity: int) -> Reader:
    """Return a reader of `rows` sequences of up to `capacity` tokens; its cache has the dtype of the weights."""
    model.eval()
    cache = model.new_cache(rows, capacity)

    def read(tokens: Tensor) -> Tensor:
        states = model.model(tokens, cache=cache)[:, -1:]  # (B, 1, D): only the last logits of a prompt are needed
        logits: Tensor = model.lm_head(states, None, 0.0)[:, -1]
        return logits

    return read


@torch.no_grad()
def continue_together(
    read: Reader,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    generators: Sequence[torch.Generator],
    sampling: Sampling,
    stop_at: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each prompt, or None if it is still being read or has ended.

    Prompts of different lengths need no padding: as many tokens as the shortest prompt has are read at once, then each
    step reads one token per row, from its prompt while that lasts, then the token just generated. So any kind of
    attention sees each row exactly as if it were alone.

    Args:
        read: reads all rows, starting from their first tokens.
        prompts: token ids, at least one each.
        max_new_tokens: most new tokens per row.
        generators: random generators, one per row, so that rows do not depend on each other.
        sampling: how tokens are drawn.
        stop_at: the token that ends a row.

    Raises:
        ValueError: the logits of a generating row do not form a distribution.
    """
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    device = generators[0].device
    tokens = torch.tensor([prompt[:shortest] for prompt in prompts], dtype=torch.int64, device=device)
    ended = [False] * len(prompts)
    for place in range(shortest, longest + max_new_tokens):
        logits = read(tokens)
        following = [prompt[place] if place < len(prompt) else 0 for prompt in prompts]
        said: list[int | None] = [None] * len(prompts)
        speaking = [
            row
            for row, prompt in enumerate(prompts)
            if len(prompt) <= place < len(prompt) + max_new_tokens and not ended[row]
        ]
        drawn = _draw_rows(speaking, logits, sampling, generators)
        for row, token in zip(speaking, drawn, strict=True):
            if token == INVALID:
                raise ValueError(OVERFLOWS)
            following[row] = said[row] = token
            ended[row] = token == stop_at or place + 1 == len(prompts[row]) + max_new_tokens
        yield said
        if all(ended):
            return
        tokens = torch.tensor(following, dtype=torch.int64, device=device)[:, None]


def _draw_rows(
    rows: Sequence[int], logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[int]:
    """Draw the next token of some rows of logits [B, V], each by its own generator, in one device transfer."""
    if sampling.temperature == 0:
        drawn: list[int] = _draw(logits, sampling, None).tolist()
        return [drawn[row] for row in rows]
    each = [_draw(logits[row : row + 1], sampling, generators[row]) for row in rows]
    return torch.cat(each).tolist() if each else []
