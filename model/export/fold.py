"""Fold what a stock architecture lacks into the weights, so that it computes the same function.

    residual multiplier, branch gain   rows of o_proj and down_proj, or the norm that ends the branch
    attention scale, temperature       gains of the queries' norm, or q_proj
    MLP input scale                    gate_proj, or up_proj of a plain MLP
    embedding multiplier               the embedding (tied: the final norm undoes it for the head)
    output multiplier                  the head (tied: the final norm)
    embedding projection               the embedding and the head
    single-scale norm                  a vector of equal gains

Folding computes in fp32 and is exact in real arithmetic. Folded weights are for inference: AdamW on them is no longer
the scaled optimizer of the parameterization.
"""

import math
from typing import Any

import torch
from torch import Tensor

from plumbline.model.attention import attention_kind
from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.multipliers import Multipliers

Weights = dict[str, Tensor]

FOLDED: dict[str, Any] = {
    "branch_gain": "fixed",
    "branch_gain_init": 1.0,
    "embedding_projection": False,
    "mlp_input_scale": None,
    "shaped_temperature": None,
}
"""Switches that fold whatever their value -> the value at which they do nothing. A single-scale norm folds, too."""


def folded_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration after `fold_multipliers`: every switch that folds has the value that does nothing.

    A tied matrix is untied if it would need two different values: there is no final norm to absorb the difference, or
    the matrix is projected.
    """
    keeps_tie = config.final_norm and not config.embedding_projection
    norm = "rmsnorm" if config.norm == "single_scale_rmsnorm" else config.norm
    tied = config.tie_word_embeddings and keeps_tie
    gains = "learned" if block_kind(config).map_is_branch else config.shaped_gains
    return config.model_copy(update={**FOLDED, "norm": norm, "tie_word_embeddings": tied, "shaped_gains": gains})


def fold_multipliers(weights: Weights, config: ModelConfig, multipliers: Multipliers) -> Weights:
    """Return weights of `folded_config(config)`, with attention scale 1/sqrt(head_dim) and all other multipliers 1.

    Args:
        weights: fp32 weights by name; a tied head has no entry.
        config: the decoder's shape.
        multipliers: those that its forward pass applies.
    """
    folded = {_norm_name(name): _spread(name, weight, config) for name, weight in weights.items()}
    _fold_ends(folded, config, multipliers)
    for i in range(config.num_hidden_layers):
        _fold_layer(folded, f"model.layers.{i}", config, multipliers)
    return folded


def state_scale(config: ModelConfig, multipliers: Multipliers) -> float:
    """Return the ratio of the folded model's final states to ours.

    A tied matrix carries the embedding multiplier, so the final norm undoes it for the head.
    """
    return multipliers.output / multipliers.embedding if folded_config(config).tie_word_embeddings else 1.0


def _norm_name(name: str) -> str:
    return f"{name.removesuffix('.scale')}.weight" if name.endswith(".scale") else name


def _spread(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Expand a single scale to the vector of gains that it stands for; return anything else unchanged."""
    return weight.expand(config.hidden_size).clone() if name.endswith(".scale") else weight


def _fold_ends(folded: Weights, config: ModelConfig, multipliers: Multipliers) -> None:
    """Fold embedding, head and the final norm between them."""
    embedding = folded["model.embed_tokens.weight"]
    if folded_config(config).tie_word_embeddings:
        _scale(folded, "model.norm", state_scale(config, multipliers))
    else:
        head = folded.get("lm_head.weight", embedding)
        if config.embedding_projection:
            head = head @ folded.pop("model.output_projection.weight")
        folded["lm_head.weight"] = head * multipliers.output
    projection = folded.pop("model.embed_projection.weight", None)
    for name in ("model.embed_tokens", "model.embed_positions"):
        if f"{name}.weight" in folded:
            _scale(folded, name, multipliers.embedding)
            if projection is not None:
                folded[f"{name}.weight"] = folded[f"{name}.weight"] @ projection.T


def _fold_layer(folded: Weights, layer: str, config: ModelConfig, multipliers: Multipliers) -> None:
    block, scaled = block_kind(config), attention_kind(config).scaled_module(config)
    if scaled is not None:
        _scale(folded, f"{layer}.self_attn.{scaled}", multipliers.attention * math.sqrt(config.head_dim))
    if block.map_is_branch:
        name = f"{layer}.self_attn.shape_gains"
        gains = folded.get(name, torch.ones(3, config.num_attention_heads))  # of identity, softmax and uniform part
        identity = torch.tensor([1.0, 0.0, 0.0])[:, None]  # what is added to it is the branch
        folded[name] = multipliers.residual * gains + (1 - multipliers.residual) * identity
    if config.mlp_input_scale is not None:
        inner = "gate_proj" if config.is_gated else "up_proj"
        _scale(folded, f"{layer}.mlp.{inner}", folded.pop(f"{layer}.mlp.input_scale"))
    for branch, last in block.branch_ends.items():
        gain: Tensor | float = 1.0 if branch in block.ends_in_norm else config.branch_gain_init
        if config.branch_gain != "fixed":
            kind = {"scalar": "scalar", "vector": "gain"}[config.branch_gain]
            gain = folded.pop(f"{layer}.{branch}_residual.{kind}")
        _scale(folded, f"{layer}.{last}", gain * multipliers.residual)


def _scale(folded: Weights, module: str, factor: Tensor | float) -> None:
    """Scale a module's output, by its weight (per row for a vector factor) and its bias."""
    weight = folded[f"{module}.weight"]
    rows = factor.view(-1, *[1] * (weight.ndim - 1)) if isinstance(factor, Tensor) else factor
    folded[f"{module}.weight"] = weight * rows
    if f"{module}.bias" in folded:
        folded[f"{module}.bias"] = folded[f"{module}.bias"] * factor
