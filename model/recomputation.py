"""Keep less of a block for the backward pass, and compute it again there: gradients stay the same to the last bit.

Only where autocast rounds a weight that is used more than once, `selective` adds up its gradient in another rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from plumbline.model.blocks.kind import Block

Result = TypeVar("Result")
Recomputed = Literal["none", "selective", "full"] | int
"""What is computed again. selective: of every block all but matrix products and attention; full: every block; n: every
n-th block."""

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
"""Operators whose results `selective` keeps: nearly all of a block's time, and less than half of its memory."""


def recompute(blocks: Sequence[Block], recomputed: Recomputed) -> None:
    """Make blocks, in the order of the model, compute again in the backward pass what `recomputed` says."""
    for number, block in enumerate(blocks, start=1):
        if isinstance(recomputed, int):
            block.recomputed = "none" if number % recomputed else "full"
        else:
            block.recomputed = recomputed


def run_block(block: Block, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function that runs a block makes of its arguments; recompute of it what the block says.

    Results by which gradients are to flow are arguments and results of the function, and nothing else.
    """
    if block.recomputed == "none" or not block.training:
        return function(*arguments)
    if block.recomputed == "full":
        return checkpoint(function, *arguments, use_reentrant=False)  # type: ignore[no-any-return]
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    function = partial(_rounding_anew, function, next(block.parameters()).device.type)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def _rounding_anew(function: Callable[..., Result], device: str, *arguments: Any) -> Result:
    """Return what a function makes of its arguments, without the weights that autocast has rounded and kept.

    Who uses a weight more than once finds it there from the second time on, but not in the backward pass, which would
    run other operators than before. Selective checkpoints refuse that.
    """
    if not torch.is_autocast_enabled(device):
        return function(*arguments)
    with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False):
        return function(*arguments)
