"""Attend under a mask of blocks (FlexAttention), skipping blocks that are masked altogether."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from plumbline.model.config import ModelConfig

SMALLEST_HEAD = 16  # what the kernel's matrix products take
MOST_GRAPHS = 128


def refusal(config: ModelConfig) -> str | None:
    """Return what the kernel cannot do of this attention, or None."""
    if config.attn_logit_softcapping is not None or config.attention_sink:
        return "attention has a cap or sinks"
    if config.dropout:
        return f"model.dropout = {config.dropout}"
    if config.head_dim < SMALLEST_HEAD:
        return f"model.head_dim = {config.head_dim} is below {SMALLEST_HEAD}"
    return None


def block_sparse_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Return the mixed values [B, H, T, head_dim], from keys and values [B, H_kv, keys, head_dim]."""
    # Uncompiled it writes the whole map out, without a backward pass on a CPU: enough to be checked there
    attend: Any = _compiled() if query.is_cuda else flex_attention
    grouped = query.size(1) != key.size(1)
    mixed: Tensor = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return mixed


@functools.cache
def _compiled() -> Any:
    permit_graphs()
    return torch.compile(flex_attention)


def permit_graphs() -> None:
    """Let one function be compiled for many shapes and masks: each pass of a thought has its own.

    Beyond torch's limit of 8 it would silently run uncompiled, and which ones do would depend on their order.
    """
    from torch._dynamo import config  # loads slowly, and most processes compile nothing

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
