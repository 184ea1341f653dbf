"""Convert a model of any class that we can export to into our decoder, for continued pretraining.

Our decoder applies the multipliers of its parameterization; a stock class applies none, or its own. The weights are
divided by the difference, so that the function is unchanged before the first step. At the base of the parameterization
there is no difference, and the weights equal the stock ones bitwise.
"""

import math
from collections.abc import Mapping
from typing import Any

from plumbline.model.config import ModelConfig
from plumbline.model.export import gpt2
from plumbline.model.export.fold import Weights, fold_multipliers
from plumbline.model.export.from_rotary import ROTARY, StockKind
from plumbline.model.export.native import KEYS, MODEL_TYPE
from plumbline.model.export.stock import PLAIN
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.stock_inputs import DOCUMENT_MASK

STORED_CONSTANT = ".rotary_emb.inv_freq"  # older Llama files store it beside the weights


def model_section(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ModelConfig that are equivalent to a stock configuration.

    Args:
        entries: its config.json with every default filled in.

    Raises:
        ValueError: it is of an unknown class, is quantized, or has a feature that this decoder lacks.
    """
    kind = entries.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"model_type = {kind}: only {', '.join(KINDS)} can be taken over")
    if entries.get("quantization_config") is not None:
        raise ValueError(
            "the model is quantized (quantization_config in its config.json): start from the one that it was made of"
        )
    masked = {DOCUMENT_MASK: True} if entries.get(DOCUMENT_MASK) else {}
    return {**PLAIN, **KINDS[kind].section(entries), "tie_word_embeddings": entries["tie_word_embeddings"], **masked}


def from_stock(entries: Mapping[str, Any], weights: Weights, config: ModelConfig, multipliers: Multipliers) -> Weights:
    """Return weights under our names with which the decoder computes the same function as the stock class.

    Args:
        entries: as for `model_section`.
        weights: fp32 weights by stock name.
        config: the decoder, equal to the section.
        multipliers: those that its forward pass applies.

    Raises:
        ValueError: see `check_skip`, or the weights are not those of the configuration.
    """
    check_skip(config, multipliers)
    weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    weights = {name: weight for name, weight in weights.items() if not name.endswith(STORED_CONSTANT)}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    weights = KINDS[entries["model_type"]].our_names(weights, config)
    return fold_multipliers(weights, config, missing_multipliers(entries, config, multipliers))


def missing_multipliers(entries: Mapping[str, Any], config: ModelConfig, multipliers: Multipliers) -> Multipliers:
    """Return what the weights of a stock class are multiplied by to become ours; arguments as for `from_stock`."""
    kind, usual = KINDS[entries["model_type"]], 1 / math.sqrt(config.head_dim)
    stock = Multipliers(attention=usual) if kind.multipliers is None else kind.multipliers(entries)
    return Multipliers(
        attention=stock.attention / multipliers.attention * usual,  # folding is relative to the usual scale
        embedding=stock.embedding / multipliers.embedding,
        residual=stock.residual / multipliers.residual,
        output=stock.output / multipliers.output,
    )


def check_skip(config: ModelConfig, multipliers: Multipliers) -> None:
    """Refuse a factor on the stream that the parameterization changes with depth, since no weight can undo that.

    Raises:
        ValueError: names both factors and what to set.
    """
    if multipliers.skip != config.skip_gain:
        raise ValueError(
            f"skip_gain = {config.skip_gain:g} of the folder would become {multipliers.skip:g} by the "
            "parameterization, and no weight can undo it: set parameterization.base_num_hidden_layers to "
            f"{config.num_hidden_layers}, the layers of the folder, or a rule that does not scale with depth"
        )


def _gpt2_section(entries: Mapping[str, Any]) -> dict[str, Any]:
    if not entries["scale_attn_weights"] or entries["scale_attn_by_inverse_layer_idx"]:
        raise ValueError("scale_attn_weights and scale_attn_by_inverse_layer_idx: only GPT-2's own can be taken over")
    activations = {theirs: ours for ours, theirs in gpt2.ACTIVATIONS.items()}
    if entries["activation_function"] not in activations:
        raise ValueError(f"activation_function = {entries['activation_function']}: only {', '.join(activations)}")
    width, heads = entries["n_embd"], entries["n_head"]
    return {
        "family": "gpt2",
        "vocab_size": entries["vocab_size"],
        "hidden_size": width,
        "num_hidden_layers": entries["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": entries["n_inner"] or 4 * width,
        "max_position_embeddings": entries["n_positions"],
        "norm": "layernorm",
        "norm_eps": entries["layer_norm_epsilon"],
        "norm_bias": True,
        "position_embedding": "learned",
        "mlp": activations[entries["activation_function"]],
        "attention_bias": True,
        "mlp_bias": True,
    }


def _native_section(entries: Mapping[str, Any]) -> dict[str, Any]:
    if entries.get("rope_frequencies") is not None:
        raise ValueError(
            "rope_frequencies: a folder of our own code does not say by which rule positions are stretched"
        )
    return {key: entries[key] for key in KEYS}


KINDS = {
    **ROTARY,
    "gpt2": StockKind(_gpt2_section, lambda weights, config: gpt2.our_names(weights, config.num_hidden_layers)),
    MODEL_TYPE: StockKind(_native_section),
}
"""Kinds from which a run can start, by `model_type` in config.json."""
