"""Hold what attention needs besides its input: positions, masks, and keys and values of earlier tokens.

What all layers of one forward pass share (rotary tables, mask) is built once, in `AttentionContext`, and passed to
every block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from plumbline.model.attention.block_sparse import text_blocks
from plumbline.model.attention.visible import text_sees
from plumbline.model.config import ModelConfig
from plumbline.model.rotary import rotary_tables


class LayerCache:
    """Hold the keys and values that one layer has seen, [B, num_key_value_heads, capacity, head_dim] each."""

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
class KeptContext:
    """Collect the share of earlier tokens, [B] per row, that each pruning layer kept in one forward pass.

    Not a bare list: ZeRO-3's hooks copy the lists among a module's arguments.
    """

    shares: list[Tensor]


@dataclass(frozen=True)
class AttentionContext:
    """Hold what every layer of one forward pass needs to know about positions."""

    rotary: tuple[Tensor, Tensor] | None
    """Cosines and sines, [B or 1, 1, T, head_dim], or None with learned positions."""
    mask: Tensor | BlockMask | None
    """True where a query may attend, [B or 1, 1, T, keys], or the same as a block mask. None: plain causal attention,
    which has a faster kernel."""
    first_values: Tensor | None = None
    """Values of the first block, [B, num_key_value_heads, T, head_dim], for model.value_residual."""
    kept: KeptContext | None = None
    """Collects the share of context that each pruning layer keeps, which is added to the loss."""


def attention_context(
    config: ModelConfig,
    positions: Tensor,
    past: int,
    document_ids: Tensor | None,
    dtype: torch.dtype,
    in_blocks: bool = False,
) -> AttentionContext:
    """Build the context for T new tokens that follow `past` cached ones.

    Args:
        config: the model's switches.
        positions: position of each token for the rotary embedding, [B or 1, T].
        past: tokens already in the cache.
        document_ids: document of each token in a packed sequence, [B, T]; None masks no documents.
        dtype: dtype of the activations; rotary tables are rounded to it once, after fp32 trigonometry.
        in_blocks: make a block mask for FlexAttention if there are no cached tokens.
    """
    rotary = None
    if config.position_embedding == "rope":
        cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        rotary = cos.to(dtype), sin.to(dtype)
    elif config.position_embedding != "learned":  # learned positions are added to the embedding
        raise NotImplementedError(f"position_embedding = {config.position_embedding}: nothing here makes one of it")

    length = positions.size(1)
    window = config.sliding_window
    needs_window = window is not None and window < past + length
    needs_prefix = past > 0 and length > 1  # SDPA's is_causal aligns the triangle with the first key, not the last
    if document_ids is None and not needs_window and not needs_prefix:
        return AttentionContext(rotary, None)
    if in_blocks and past == 0:
        return AttentionContext(rotary, text_blocks(length, window, document_ids, positions.device))

    query = torch.arange(past, past + length, device=positions.device)[None, None, :, None]  # [1, 1, T, 1]
    key = torch.arange(past + length, device=positions.device)  # [past + T]
    documents = None if document_ids is None else (document_ids[:, None, :, None], document_ids[:, None, None, :])
    return AttentionContext(rotary, text_sees(query, key, window, documents))
