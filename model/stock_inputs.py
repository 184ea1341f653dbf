"""Feed a batch of packed documents, or a cache, to a causal language model of transformers."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn

DOCUMENT_MASK = "document_mask"
"""Key of an exported config.json: the run was trained so that the documents of a sample do not see each other."""

CACHE = ("cache", "past_key_values")
"""Names of a cache in transformers: since 5.24, and before."""


def cache_argument(module: nn.Module) -> str:
    """Return the name by which a module of transformers takes a cache: the older one if its signature has neither."""
    return next((name for name in CACHE if name in signature(module.forward).parameters), CACHE[-1])


def stock_inputs(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments with which to call a module, so that documents see each other only if they did in training.

    Args:
        module: of transformers.
        batch: input_ids [B, T]; `positions` [B, T], counted from the start of each document, where there are several.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
    if getattr(module.config, DOCUMENT_MASK, False) and "positions" in batch:
        # Without a cache or padding mask, transformers (seen with 5.23) tells documents by positions that restart
        inputs |= {"position_ids": batch["positions"].long(), "use_cache": False}
    return inputs
