"""Sample autoregressively with a KV cache, through the same forward pass that trains (multipliers included)."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plumbline.model.decoder import CausalLM

Reader = Callable[[Tensor], Tensor]
"""Reads the next tokens [B, T] of each row, after all that it has read before; returns the next-token logits [B, V]."""


def sample_token(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token id [B] for each row of logits [B, V]; temperature 0 is greedy.

    Raises:
        ValueError: the logits do not form a distribution.
    """
    if not torch.isfinite(logits.logsumexp(-1)).all():
        raise ValueError("the logits of the next token are nan or inf: the model overflows; try --dtype fp32")
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        cutoff = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < cutoff, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all likelier tokens
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


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
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
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
        temperature: see `sample_token`.
        top_k: see `sample_token`.
        top_p: see `sample_token`.
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
        following, said = [0] * len(prompts), list[int | None]()
        likeliest = _likeliest(logits) if temperature == 0 else None
        for row, prompt in enumerate(prompts):
            speaks = len(prompt) <= place < len(prompt) + max_new_tokens and not ended[row]
            if place < len(prompt):
                following[row] = prompt[place]
            elif speaks and likeliest is not None and likeliest[row] >= 0:
                following[row] = likeliest[row]
            elif speaks:  # raises if there is no likeliest token
                drawn = sample_token(logits[row : row + 1], temperature, top_k, top_p, generators[row])
                following[row] = int(drawn.item())
            said.append(following[row] if speaks else None)
            ended[row] |= speaks and (following[row] == stop_at or place + 1 == len(prompt) + max_new_tokens)
        yield said
        if all(ended):
            return
        tokens = torch.tensor(following, dtype=torch.int64, device=device)[:, None]


def _likeliest(logits: Tensor) -> list[int]:
    """Return the likeliest token of each row of logits [B, V], or -1 if they are invalid, in one device transfer."""
    return torch.where(logits.logsumexp(-1).isfinite(), logits.argmax(-1), -1).tolist()
