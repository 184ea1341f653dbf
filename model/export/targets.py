"""What `--target` means: which Hugging Face class computes what a decoder computes, its configuration and weights."""

import math
from dataclasses import replace
from typing import Any

from plumbline.model.config import ModelConfig
from plumbline.model.export import rotary_classes
from plumbline.model.export.compat import compat
from plumbline.model.export.fold import Weights, fold_multipliers, folded_config
from plumbline.model.export.gpt2 import GPT2
from plumbline.model.export.native import native
from plumbline.model.export.stock import Export, StockClass
from plumbline.model.parameterization.multipliers import Multipliers

STOCK: dict[str, StockClass] = {
    "llama": rotary_classes.LLAMA,
    "qwen3": rotary_classes.QWEN3,
    "gpt2": GPT2,
    "arcee": rotary_classes.ARCEE,
    "apertus": rotary_classes.APERTUS,
    "olmo2": rotary_classes.OLMO2,
    "exaone4": rotary_classes.EXAONE4,
    "qwen3_5": rotary_classes.QWEN3_5,
    "gemma2": rotary_classes.GEMMA2,
    "gemma3": rotary_classes.GEMMA3,
    "cohere": rotary_classes.COHERE,
    "granite": rotary_classes.GRANITE,
}
TARGETS = (*STOCK, "compat", "native")


def to_hugging_face(target: str, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    """Configuration and fp32 weights for a Hugging Face class.

    Args:
        target: one of TARGETS, or auto: the stock class that computes this decoder, else native.
        config: the decoder's shape.
        multipliers: what its forward pass applies.
        weights: its fp32 weights by name.

    Raises:
        ValueError: the target is unknown or cannot express a switch of this decoder.
    """
    if config.attention == "pruned":
        raise ValueError(
            "model.attention = pruned cannot be exported: no engine forgets keys and values layer by layer, as "
            "launcher/generate.py does"
        )
    folded, target = folded_config(config), resolved(target, config)
    if target == "compat":
        return compat(config, multipliers, weights)
    if target == "native":
        return native(folded, fold_multipliers(weights, config, multipliers))
    refusal = STOCK[target].refusal(folded)
    if refusal is not None:
        raise ValueError(f"--target {target} {refusal}: try another target, or native")
    missing = to_fold(target, config, multipliers)
    entries, stock = STOCK[target].build(folded, fold_multipliers(weights, config, missing))
    if target == "granite":
        entries |= _granites(multipliers)
    return entries, stock


def resolved(target: str, config: ModelConfig) -> str:
    """The target itself, or the one that auto stands for.

    Raises:
        ValueError: the target is unknown.
    """
    folded = folded_config(config)
    if target == "auto":
        return next((name for name, stock in STOCK.items() if stock.refusal(folded) is None), "native")
    if target not in TARGETS:
        raise ValueError(f"--target {target}: unknown; known targets: auto, {', '.join(TARGETS)}")
    return target


def to_fold(target: str, config: ModelConfig, multipliers: Multipliers) -> Multipliers:
    """What has to go into the weights: nothing in Granite, whose weights, without learned gains, stay as trained."""
    if target != "granite":
        return multipliers
    return replace(multipliers, attention=1 / math.sqrt(config.head_dim), embedding=1.0, residual=1.0, output=1.0)


def _granites(multipliers: Multipliers) -> dict[str, Any]:
    """The entries of the one stock class that has all four multipliers."""
    return {
        "attention_multiplier": multipliers.attention,
        "embedding_multiplier": multipliers.embedding,
        "residual_multiplier": multipliers.residual,
        "logits_scaling": 1 / multipliers.output,
    }
