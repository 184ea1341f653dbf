"""Export to stock classes with rotary positions: Llama, and classes that share most of its configuration and names.

Weights are already folded (fold.py), and folded switches in configurations have their plain values.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from plumbline.model.config import ModelConfig
from plumbline.model.export.fold import Weights
from plumbline.model.export.stock import GATED, UNGATED, Export, StockClass, llama_entries, renamed, rope_parameters
from plumbline.model.mlp import XIELU
from plumbline.model.parameterization.multipliers import Multipliers

APERTUS_NAMES = {
    "input_layernorm": "attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
    "mlp.activation": "mlp.act_fn",
}
OLMO2_NAMES = {"q_whole_norm": "q_norm", "k_whole_norm": "k_norm"}
"""Parts of our names -> the class's names."""
XIELU_CONSTANTS = {"beta": XIELU.BETA, "eps": XIELU.EPS}
"""The activation's constants, which transformers stores."""


def _llama(config: ModelConfig, weights: Weights) -> Export:
    entries = {"model_type": "llama", **llama_entries(config), "head_dim": config.head_dim}
    return {**entries, "mlp_bias": config.mlp_bias}, weights


def _granite(config: ModelConfig, weights: Weights) -> Export:
    return {"model_type": "granite", **llama_entries(config), "mlp_bias": config.mlp_bias}, weights


def _granite_multipliers(multipliers: Multipliers) -> dict[str, Any]:
    return {
        "attention_multiplier": multipliers.attention,
        "embedding_multiplier": multipliers.embedding,
        "residual_multiplier": multipliers.residual,
        "logits_scaling": 1 / multipliers.output,
    }


def _qwen3(config: ModelConfig, weights: Weights) -> Export:
    entries = {"model_type": "qwen3", **llama_entries(config), "head_dim": config.head_dim}
    if config.sliding_window is not None:
        entries |= {"use_sliding_window": True, "sliding_window": config.sliding_window, "max_window_layers": 0}
    return entries, weights


def _qwen3_5(config: ModelConfig, weights: Weights) -> Export:
    """Join queries and their gates in one projection, head by head; store norms as gain - 1."""
    rope = {**rope_parameters(config), "partial_rotary_factor": 1.0}
    layer_types = ["full_attention"] * config.num_hidden_layers
    entries = {"model_type": "qwen3_5_text", **llama_entries(config), "head_dim": config.head_dim}
    entries |= {"rope_parameters": rope, "partial_rotary_factor": 1.0, "layer_types": layer_types}
    stock = _zero_centred(weights)
    for gate_name in [name for name in stock if ".g_proj." in name]:
        query_name = gate_name.replace("g_proj", "q_proj")
        gate, query = stock.pop(gate_name), stock[query_name]
        heads = (config.num_attention_heads, config.head_dim, *query.shape[1:])
        stock[query_name] = torch.cat((query.view(heads), gate.view(heads)), dim=1).flatten(0, 1)
    return entries, stock


def _arcee(config: ModelConfig, weights: Weights) -> Export:
    entries = {"model_type": "arcee", **llama_entries(config), "head_dim": config.head_dim}
    return {**entries, "mlp_bias": config.mlp_bias}, weights


def _apertus(config: ModelConfig, weights: Weights) -> Export:
    stock = renamed(weights, APERTUS_NAMES)
    if config.mlp == "xielu":
        for i in range(config.num_hidden_layers):
            for name, value in XIELU_CONSTANTS.items():
                stock[f"model.layers.{i}.mlp.act_fn.{name}"] = torch.tensor(value)
    return {"model_type": "apertus", **llama_entries(config)}, stock


def _olmo2(config: ModelConfig, weights: Weights) -> Export:
    return {"model_type": "olmo2", **llama_entries(config)}, renamed(weights, OLMO2_NAMES)


def _exaone4(config: ModelConfig, weights: Weights) -> Export:
    windowed = config.sliding_window is not None
    entries = {"model_type": "exaone4", **llama_entries(config), "sliding_window": config.sliding_window}
    layer_type = "sliding_attention" if windowed else "full_attention"
    return {**entries, "layer_types": [layer_type] * config.num_hidden_layers}, weights


def _gemma_embedding_scale(config: ModelConfig) -> float:
    return math.sqrt(config.hidden_size)


def _gemma(config: ModelConfig, weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Build the common part of Gemma 2 and 3: an embedding multiplied by sqrt(width), norms stored as gain - 1."""
    factor = _gemma_embedding_scale(config)
    stock = dict(weights)
    stock["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] / factor
    if config.tie_word_embeddings:
        stock["model.norm.weight"] = weights["model.norm.weight"] * factor
    entries = llama_entries(config)
    layer_type = "full_attention" if config.sliding_window is None else "sliding_attention"
    entries |= {
        "head_dim": config.head_dim,
        "hidden_activation": entries.pop("hidden_act"),
        "query_pre_attn_scalar": config.head_dim,
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "layer_types": [layer_type] * config.num_hidden_layers,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return entries, _zero_centred(stock)


def _gemma2(config: ModelConfig, weights: Weights) -> Export:
    entries, stock = _gemma(config, weights)
    return {"model_type": "gemma2", **entries}, stock


def _gemma3(config: ModelConfig, weights: Weights) -> Export:
    entries, stock = _gemma(config, weights)
    rope = entries["rope_parameters"]
    rope_by_layer = {"full_attention": rope, "sliding_attention": rope}
    return {"model_type": "gemma3_text", **entries, "rope_parameters": rope_by_layer}, stock


def _cohere(config: ModelConfig, weights: Weights) -> Export:
    """Reorder rows of q and k: its rotary embedding pairs neighbours, ours the halves of a head."""
    entries = llama_entries(config)
    entries |= {"model_type": "cohere", "layer_norm_eps": entries.pop("rms_norm_eps"), "logit_scale": 1.0}
    order = pairs_of_neighbours(config.head_dim)
    stock = dict(weights)
    for name, weight in weights.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = weight.view(-1, config.head_dim, *weight.shape[1:])
            stock[name] = heads[:, order].flatten(0, 1)
    return entries, stock


def pairs_of_neighbours(head_dim: int) -> torch.Tensor:
    """Return the row order of a head that puts rotating pairs side by side: 0, half, 1, half + 1, ..."""
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


def _zero_centred(weights: Weights) -> Weights:
    return {name: weight - 1 if "norm." in name else weight for name, weight in weights.items()}


LLAMA = StockClass(_llama, {"mlp": GATED, "attention_bias": None, "mlp_bias": None}, whole_heads=True)
GRANITE = StockClass(
    _granite, LLAMA.allows, whole_heads=True, free_head_dim=False, multiplier_entries=_granite_multipliers
)
QWEN3 = StockClass(_qwen3, {"mlp": GATED, "attention_bias": None, "qk_norm": ("head",), "sliding_window": None})
QWEN3_5 = StockClass(
    _qwen3_5, {"mlp": GATED, "attention_bias": None, "qk_norm": ("head",), "attention_gate": ("elementwise",)}
)
ARCEE = StockClass(_arcee, {"mlp": UNGATED, "attention_bias": None, "mlp_bias": None}, whole_heads=True)
APERTUS = StockClass(
    _apertus, {"mlp": (*UNGATED, "xielu"), "attention_bias": None, "qk_norm": ("head",)}, free_head_dim=False
)
OLMO2 = StockClass(
    _olmo2,
    {"block": ("post_norm",), "mlp": GATED, "attention_bias": None, "qk_norm": ("projection",)},
    free_head_dim=False,
)
EXAONE4 = StockClass(
    _exaone4,
    {"block": ("post_norm",), "mlp": GATED, "qk_norm": ("head",), "sliding_window": None},
    free_head_dim=False,
)
GEMMA2 = StockClass(
    _gemma2,
    {
        "block": ("sandwich_norm",),
        "mlp": GATED,
        "attention_bias": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": None,
    },
    whole_heads=True,
    embedding_scale=_gemma_embedding_scale,
)
GEMMA3 = replace(
    GEMMA2,
    build=_gemma3,
    # Its fused attention ignores the cap
    allows={**GEMMA2.allows, "qk_norm": ("head",), "attn_logit_softcapping": (None,)},
)
COHERE = StockClass(
    _cohere,
    {"parallel": (True,), "norm": ("layernorm",), "mlp": GATED, "attention_bias": None},
    free_head_dim=False,
)
