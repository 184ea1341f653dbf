"""Choose the Hugging Face class for `--target`, and build a decoder's configuration and weights for it."""

from plumbline.model.config import ModelConfig
from plumbline.model.export import rotary_classes
from plumbline.model.export.compat import COMPAT
from plumbline.model.export.fold import Weights
from plumbline.model.export.gpt2 import GPT2
from plumbline.model.export.native import NATIVE
from plumbline.model.export.stock import Export, Target
from plumbline.model.parameterization.multipliers import Multipliers

AUTO = "auto"
TARGETS: dict[str, Target] = {
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
    "compat": COMPAT,
    "native": NATIVE,
}
"""Targets by name; auto takes the first automatic one that supports the decoder."""


def resolved(target: str, config: ModelConfig) -> str:
    """Return the name of the target, with auto resolved.

    Args:
        target: a key of TARGETS, or auto.
        config: the decoder's shape.

    Raises:
        ValueError: the target is unknown, or cannot express a switch of this decoder.
    """
    if target == AUTO:
        automatic = [name for name, each in TARGETS.items() if each.is_automatic]
        target = next((name for name in automatic if TARGETS[name].refusal(config) is None), automatic[-1])
    if target not in TARGETS:
        raise ValueError(f"--target {target}: unknown; known targets: {AUTO}, {', '.join(TARGETS)}")
    refusal = TARGETS[target].refusal(config)
    if refusal is not None:
        others = [name for name, each in TARGETS.items() if each.refusal(config) is None]
        remedy = f"try {' or '.join(others)}" if others else "no target can"
        raise ValueError(f"--target {target} {refusal}: {remedy}")
    return target


def to_hugging_face(target: str, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
    """Return configuration and fp32 weights for a Hugging Face class.

    Args:
        target: a key of TARGETS, or auto: the stock class that supports this decoder, else native.
        config: the decoder's shape.
        multipliers: those that its forward pass applies.
        weights: its fp32 weights by name.

    Raises:
        ValueError: see `resolved`.
    """
    return TARGETS[resolved(target, config)].export(config, multipliers, weights)
