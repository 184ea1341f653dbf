"""Sample autoregressively with a KV cache, through the same forward pass that trains (multipliers included)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM


def sample_token(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token id for each row of logits [B, V]; temperature 0 is greedy. Returns [B]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        cutoff = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < cutoff, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the likelier tokens
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the continuation of prompt [B, T] one token at a time, each [B]; the caller decides when to stop.

    Raises:
        ValueError: see `check_request`.
    """
    check_request(model.config, prompt, max_new_tokens, temperature, top_k, top_p)
    model.eval()
    cache = model.new_cache(prompt.size(0), prompt.size(1) + max_new_tokens)
    tokens = prompt
    for _ in range(max_new_tokens):
        logits = model(tokens, cache=cache)[:, -1]
        token = sample_token(logits, temperature, top_k, top_p, generator)
        yield token
        tokens = token[:, None]


def check_request(
    config: ModelConfig,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Refuse what cannot be continued.

    Raises:
        ValueError: the prompt is empty, prompt and continuation exceed the model's max_position_embeddings, or a
            sampling option is outside its range.
    """
    longest, end = config.max_position_embeddings, prompt.size(1) + max_new_tokens
    if prompt.size(1) == 0:
        raise ValueError("the prompt has no tokens: give at least one (the end-of-text token starts a fresh document)")
    if end > longest:
        raise ValueError(
            f"{prompt.size(1)} prompt tokens + {max_new_tokens} new ones exceed max_position_embeddings = {longest}: "
            "shorten the prompt or ask for fewer tokens"
        )
    if temperature < 0:
        raise ValueError(f"temperature = {temperature}: 0 is greedy, larger is more random")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k}: keep at least 1 token, or leave it out to keep all")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: lies in (0, 1]; leave it out to keep all tokens")
