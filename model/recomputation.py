"""Recompute activations of blocks in the backward pass instead of storing them; gradients stay bitwise the same.

The only exception is `selective` with a weight that autocast rounds and that is used more than once: its gradient is
summed with different rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from plumbline.model.blocks.kind import Block

Result = TypeVar("Result")
Recomputed = Literal["none", "selective", "full"] | int
"""What is recomputed. selective: everything but matrix products and attention, in every block; full: every block; n:
every n-th block."""

_ATEN = torch.ops.aten
KEPT = [
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN._scaled_mm,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
    )
]
"""Operators whose results `selective` stores: nearly all of a block's time, and less than half of its memory."""


def recompute(blocks: Sequence[Block], recomputed: Recomputed) -> None:
    """Configure which blocks, given in the order of the model, recompute what in the backward pass."""
    for number, block in enumerate(blocks, start=1):
        if isinstance(recomputed, int):
            block.recomputed = "none" if number % recomputed else "full"
        else:
            block.recomputed = recomputed


def run_block(block: Block, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function that runs a block, with the block's recomputation.

    Tensors through which gradients should flow must be arguments or results of the function.
    """
    if block.recomputed == "none" or not block.training:
        return function(*arguments)
    if block.recomputed == "full":
        return checkpoint(function, *arguments, use_reentrant=False)  # type: ignore[no-any-return]
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    function = partial(_rounding_anew, function, next(block.parameters()).device.type)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def _rounding_anew(function: Callable[..., Result], device: str, *arguments: Any) -> Result:
    """Call a function without autocast's cache of rounded weights.

    With the cache, the second use of a weight skips the rounding, but not when it is recomputed in the backward pass,
    which would then run different operators. Selective checkpointing refuses that.
    """
    if not torch.is_autocast_enabled(device):
        return function(*arguments)
    with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False):
        return function(*arguments)
