"""Convert models of stock classes with rotary positions to ours: the inverse of rotary_classes.py."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import Weights
from plumbline.model.export.rotary_classes import (
    APERTUS_NAMES,
    OLMO2_NAMES,
    XIELU_CONSTANTS,
    pairs_of_neighbours,
)
from plumbline.model.export.stock import ACTIVATION_NAMES, GATED, UNGATED, renamed
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.rotary_scaling import scaling_of

Entries = Mapping[str, Any]
GATED_BY_NAME = {ACTIVATION_NAMES[mlp]: mlp for mlp in GATED}
PLAIN_BY_NAME = {ACTIVATION_NAMES[mlp]: mlp for mlp in UNGATED}


@dataclass(frozen=True)
class StockKind:
    """Define how models of one transformers class are converted."""

    section: Callable[[Entries], dict[str, Any]]
    """Returns the values of ModelConfig from its configuration."""
    our_names: Callable[[Weights, ModelConfig], Weights] = lambda weights, _: weights
    """Returns its weights under our names."""
    multipliers: Callable[[Entries], Multipliers] | None = None
    """Returns the multipliers of its configuration, or None if the class has none."""


def _only(entries: Entries, **values: Any) -> None:
    """Refuse a configuration that has one of these keys with a different value."""
    for key, value in values.items():
        if entries.get(key, value) != value:
            raise ValueError(f"{key} = {entries[key]}: only {value} can be taken over")


def _llama(entries: Entries, activations: Mapping[str, str] = GATED_BY_NAME) -> dict[str, Any]:
    rope, activation = entries["rope_parameters"], entries["hidden_act"]
    if activation not in activations:
        raise ValueError(f"hidden_act = {activation}: only {', '.join(activations)} can be taken over")
    if len(set(entries.get("layer_types") or ())) > 1:
        raise ValueError("layer_types: this decoder has one kind of attention in all layers")
    windowed = "sliding_attention" in (entries.get("layer_types") or ())
    heads, width, head_dim = entries["num_attention_heads"], entries["hidden_size"], entries.get("head_dim")
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "family": "llama",
        **{key: entries[key] for key in (*same, "intermediate_size", "max_position_embeddings")},
        "attention_bias": entries.get("attention_bias", False),
        "head_dim": width // heads if head_dim is None else head_dim,
        "norm_eps": entries["rms_norm_eps"],
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": scaling_of(rope),
        "mlp": activations[activation],
        "mlp_bias": entries.get("mlp_bias", False),
        "qk_norm": "none",
        "sliding_window": entries["sliding_window"] if windowed else None,
    }


def _qwen3(entries: Entries) -> dict[str, Any]:
    return {**_llama(entries), "family": "qwen3", "qk_norm": "head"}


def _granite_multipliers(entries: Entries) -> Multipliers:
    return Multipliers(
        attention=entries["attention_multiplier"],
        embedding=entries["embedding_multiplier"],
        residual=entries["residual_multiplier"],
        output=1 / entries["logits_scaling"],
    )


def _arcee(entries: Entries) -> dict[str, Any]:
    return _llama(entries, PLAIN_BY_NAME)


def _apertus(entries: Entries) -> dict[str, Any]:
    return {**_llama(entries, {**PLAIN_BY_NAME, "xielu": "xielu"}), "qk_norm": "head", "mlp_bias": False}


def _apertus_weights(stock: Weights, _config: ModelConfig) -> Weights:
    """Drop the constants of its activation, which must equal ours."""
    constants = {name: stock[name].item() for name in stock if name.rpartition(".")[2] in XIELU_CONSTANTS}
    for name, value in constants.items():
        expected = XIELU_CONSTANTS[name.rpartition(".")[2]]
        if not math.isclose(value, expected, rel_tol=1e-2):  # bf16 files have them rounded
            raise ValueError(f"{name} = {value}: only {expected} can be taken over")
    weights = {name: weight for name, weight in stock.items() if name not in constants}
    return renamed(weights, {theirs: ours for ours, theirs in APERTUS_NAMES.items()})


def _olmo2(entries: Entries) -> dict[str, Any]:
    return {**_llama(entries), "block": "post_norm", "qk_norm": "projection", "mlp_bias": False}


def _olmo2_weights(stock: Weights, _config: ModelConfig) -> Weights:
    return renamed(stock, {theirs: ours for ours, theirs in OLMO2_NAMES.items()})


def _exaone4(entries: Entries) -> dict[str, Any]:
    section = {**_llama(entries), "block": "post_norm", "qk_norm": "head", "attention_bias": False, "mlp_bias": False}
    if section["sliding_window"] is None:  # with a window, its full-attention layers have no positions
        _only(entries, sliding_window=None)
    return section


def _cohere(entries: Entries) -> dict[str, Any]:
    _only(entries, use_qk_norm=False)
    section = _llama({**entries, "rms_norm_eps": entries["layer_norm_eps"]})
    return {**section, "parallel": True, "norm": "layernorm", "mlp_bias": False}


def _cohere_weights(stock: Weights, config: ModelConfig) -> Weights:
    """Reorder rows of q and k back: its rotary embedding pairs neighbours, ours the halves of a head."""
    order = pairs_of_neighbours(config.head_dim).argsort()

    def ours(name: str, weight: Tensor) -> Tensor:
        if not (".q_proj." in name or ".k_proj." in name):
            return weight
        return weight.view(-1, config.head_dim, *weight.shape[1:])[:, order].flatten(0, 1)

    return {name: ours(name, weight) for name, weight in stock.items()}


def _cohere_multipliers(entries: Entries) -> Multipliers:
    usual = (entries["hidden_size"] // entries["num_attention_heads"]) ** -0.5
    return Multipliers(attention=usual, output=entries["logit_scale"])


def _gemma2(entries: Entries) -> dict[str, Any]:
    section = _llama({**entries, "hidden_act": entries["hidden_activation"]})
    caps = {key: entries[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {**section, **caps, "block": "sandwich_norm", "mlp_bias": False}


def _gemma3(entries: Entries) -> dict[str, Any]:
    _only(entries, use_bidirectional_attention=False)
    kinds = set(entries["layer_types"])
    ropes = [entries["rope_parameters"][kind] for kind in sorted(kinds)]
    return {**_gemma2({**entries, "rope_parameters": ropes[0]}), "qk_norm": "head"}


def _gemma_multipliers(entries: Entries) -> Multipliers:
    scale = entries["query_pre_attn_scalar"] ** -0.5
    return Multipliers(attention=scale, embedding=math.sqrt(entries["hidden_size"]))


def _from_zero_centred(stock: Weights, _config: ModelConfig) -> Weights:
    return {name: weight + 1 if "norm." in name else weight for name, weight in stock.items()}


def _qwen3_5(entries: Entries) -> dict[str, Any]:
    _only(entries["rope_parameters"], partial_rotary_factor=1.0)
    _only({"layer_types": set(entries["layer_types"])}, layer_types={"full_attention"})
    return {**_llama(entries), "qk_norm": "head", "attention_gate": "elementwise", "mlp_bias": False}


def _qwen3_5_weights(stock: Weights, config: ModelConfig) -> Weights:
    """Separate queries and their gates, which share one projection, head by head."""
    weights = _from_zero_centred(stock, config)
    for name in [name for name in weights if ".q_proj." in name]:
        both = weights[name].view(config.num_attention_heads, 2, config.head_dim, *weights[name].shape[1:])
        weights[name], weights[name.replace("q_proj", "g_proj")] = (each.flatten(0, 1) for each in both.unbind(1))
    return weights


ROTARY = {
    "llama": StockKind(_llama),
    "qwen3": StockKind(_qwen3),
    "granite": StockKind(_llama, multipliers=_granite_multipliers),
    "arcee": StockKind(_arcee),
    "apertus": StockKind(_apertus, _apertus_weights),
    "olmo2": StockKind(_olmo2, _olmo2_weights),
    "exaone4": StockKind(_exaone4),
    "cohere": StockKind(_cohere, _cohere_weights, _cohere_multipliers),
    "gemma2": StockKind(_gemma2, _from_zero_centred, _gemma_multipliers),
    "gemma3_text": StockKind(_gemma3, _from_zero_centred, _gemma_multipliers),
    "qwen3_5_text": StockKind(_qwen3_5, _qwen3_5_weights),
}
"""Kinds by `model_type` in config.json."""
