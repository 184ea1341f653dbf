"""Attention under a mask of blocks (FlexAttention), which passes over blocks that are masked altogether."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.config import ModelConfig

SMALLEST_HEAD = 16  # what the kernel's matrix products take


def is_served(config: ModelConfig, device: torch.device) -> bool:
    """Whether there is a kernel with a backward pass for this attention on this device."""
    plain = config.attn_logit_softcapping is None and not config.attention_sink and config.dropout == 0
    return device.type == "cuda" and plain and config.head_dim >= SMALLEST_HEAD


def block_sparse_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """[B, H, T, head_dim], from keys and values [B, H_kv, keys, head_dim]."""
    # Uncompiled it writes the whole map out, without a backward pass on a CPU: enough to be checked there
    attend: Any = _compiled() if query.is_cuda else flex_attention
    grouped = query.size(1) != key.size(1)
    mixed: Tensor = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return mixed


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
