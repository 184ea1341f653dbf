"""Attend under a block mask (FlexAttention), skipping blocks that are fully masked."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from plumbline.model.attention.visible import text_sees
from plumbline.model.config import ModelConfig

SMALLEST_HEAD = 16  # the least that the kernel's matrix products support
MOST_GRAPHS = 128
BLOCK = 128
"""Queries and keys per block: the size for which the kernel is tuned."""


def refusal(config: ModelConfig) -> str | None:
    """Return what in this attention the kernel does not support, or None."""
    if config.attn_logit_softcapping is not None or config.attention_sink:
        return "attention has a cap or sinks"
    if config.dropout:
        return f"model.dropout = {config.dropout}"
    if config.head_dim < SMALLEST_HEAD:
        return f"model.head_dim = {config.head_dim} is below {SMALLEST_HEAD}"
    return None


def block_sparse_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Return the mixed values [B, H, T, head_dim], from keys and values [B, H_kv, keys, head_dim]."""
    # Within a compiled block it becomes part of the graph. Uncompiled it materialises the whole map, without a backward
    # pass on a CPU, which is enough for checks there
    apart = query.is_cuda and not torch.compiler.is_compiling()
    attend: Any = _compiled() if apart else flex_attention
    grouped = query.size(1) != key.size(1)
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast does not do this for this kernel
    # Below 128 queries torch chooses a decoding kernel, in which blocks of this size do not work with grouped heads
    options = {"FORCE_USE_FLEX_ATTENTION": True} if query.is_cuda else None
    mixed: Tensor = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options)
    return mixed


def text_blocks(length: int, window: int | None, document_ids: Tensor | None, device: torch.device) -> BlockMask:
    """Return the block mask of text that attends to itself: the same mask that `attention_context` makes densely.

    It is computed from the lowest and highest document id in each block of tokens, [B, blocks], so nothing of size [T,
    T] is allocated.

    Args:
        length: T.
        window: how many tokens a token sees, itself included; None means all before it.
        document_ids: document of each token, [B, T]; None masks no documents.
        device: device of the mask.
    """

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        documents = None if document_ids is None else (document_ids[row, query], document_ids[row, key])
        return text_sees(query, key, window, documents)

    first = torch.arange(0, length, BLOCK, device=device)[None]  # first token of each block, [1, blocks]
    last = (first + BLOCK - 1).clamp_max(length - 1)
    some = _keys(first) <= _queries(last)  # [1 or B, blocks of queries, blocks of keys]
    every = (_keys(last) <= _queries(first)) & _queries(first + BLOCK <= length)  # partial blocks go by `sees`
    if window is not None:
        some = some & (_queries(first) - _keys(last) < window)
        every = every & (_queries(last) - _keys(first) < window)
    if document_ids is not None:
        low, high = _extremes(document_ids, first.size(1))
        some = some & (_keys(low) <= _queries(high)) & (_keys(high) >= _queries(low))
        every = every & (_keys(low) == _queries(high)) & (_keys(high) == _queries(low))
    partial, whole = (_listed(blocks[:, None]) for blocks in (some & ~every, every))
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK, sees, (length, length))


def _queries(values: Tensor) -> Tensor:
    return values[:, :, None]


def _keys(values: Tensor) -> Tensor:
    return values[:, None, :]


def _extremes(document_ids: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest id of `document_ids` [B, T] in each block, [B, blocks]."""
    missing = blocks * BLOCK - document_ids.size(1)
    ids = torch.cat((document_ids, document_ids[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (blocks, BLOCK))
    return ids.amin(-1), ids.amax(-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks for each query block, and all block indices with those key blocks first."""
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), numbers.to(torch.int32).contiguous()


@functools.cache
def _compiled() -> Any:
    permit_graphs()
    return torch.compile(flex_attention)


def permit_graphs() -> None:
    """Allow one function to be compiled for many shapes and masks, since each pass of a thought has its own.

    Beyond torch's limit of 8, further ones would silently run uncompiled, depending on their order.
    """
    from torch._dynamo import config  # loads slowly, and most processes compile nothing

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
