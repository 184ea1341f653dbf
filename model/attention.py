"""Softmax self-attention: grouped queries, optional QK-norm, rotary positions, sliding window, document mask, KV cache.

What all layers share in one forward (rotary tables, mask) is built once, in `AttentionContext`, and handed to every
block; a block that changes attention changes this file and nothing else.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.norms import make_head_norm
from model.rotary import apply_rotary, rotary_tables


class LayerCache:
    """Keys and values of the tokens already seen by one layer, [B, num_key_value_heads, capacity, head_dim] each."""

    def __init__(
        self, batch: int, capacity: int, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new tokens and return all keys and values so far, [B, num_key_value_heads, length, head_dim]."""
        end = self.length + keys.size(2)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(frozen=True)
class AttentionContext:
    """What every layer of one forward needs to know about positions."""

    rotary: tuple[Tensor, Tensor] | None
    """Cosines and sines, [B or 1, 1, T, head_dim]; None with learned positions."""
    mask: Tensor | None
    """True where a query may look, [B or 1, 1, T, keys]. None: plain causal attention, which has a faster kernel."""


def attention_context(
    config: ModelConfig, positions: Tensor, past: int, document_ids: Tensor | None, dtype: torch.dtype
) -> AttentionContext:
    """Build the context for T new tokens that follow `past` cached ones.

    Args:
        config: the model's switches.
        positions: position of each token for the rotary embedding, [B or 1, T].
        past: tokens already in the cache.
        document_ids: document of each token in a packed sequence, [B, T]; None masks no documents.
        dtype: dtype of the activations; rotary tables are rounded to it once, after fp32 trigonometry.
    """
    rotary = None
    if config.position_embedding == "rope":
        cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta)
        rotary = cos.to(dtype), sin.to(dtype)

    length = positions.size(1)
    window = config.sliding_window
    needs_window = window is not None and window < past + length
    needs_prefix = past > 0 and length > 1  # SDPA's is_causal would align the triangle with the first key, not the last
    if document_ids is None and not needs_window and not needs_prefix:
        return AttentionContext(rotary, None)

    query = torch.arange(past, past + length, device=positions.device)[:, None]  # [T, 1]
    key = torch.arange(past + length, device=positions.device)[None, :]  # [1, past + T]
    mask = key <= query
    if window is not None:
        mask = mask & (query - key < window)
    mask = mask[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return AttentionContext(rotary, mask)


class Attention(nn.Module):
    """[B, T, hidden_size] -> [B, T, hidden_size]; `scale` multiplies the logits (the parameterization decides it)."""

    def __init__(self, config: ModelConfig, scale: float) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = scale
        self.dropout = config.dropout
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        self.shares_heads = query_width != key_value_width
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = make_head_norm(config) if config.qk_norm else nn.Identity()
        self.k_norm = make_head_norm(config) if config.qk_norm else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H * head_dim] -> [B, T, H, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Attend from the T tokens of x to themselves and to what the cache holds."""
        query = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)  # (B, H, T, head_dim)
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)  # (B, H_kv, T, head_dim)
        value = self._heads(self.v_proj(x)).transpose(1, 2)  # (B, H_kv, T, head_dim)
        if context.rotary is not None:
            query, key = apply_rotary(query, *context.rotary), apply_rotary(key, *context.rotary)
        if cache is not None:
            key, value = cache.append(key, value)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=context.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=context.mask is None and query.size(2) > 1,
            scale=self.scale,
            enable_gqa=self.shares_heads,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
