"""Define what a stock Hugging Face class can compute: a table of plain switches, and what each class adds.

A folder that loads but computes something else is worse than none, so a switch that a class does not list must have its
plain value. Every field of ModelConfig is in one of the three sets below, which a test enforces.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.export.fold import Weights, fold_multipliers, folded_config, state_scale
from plumbline.model.parameterization.multipliers import Multipliers

Export = tuple[dict[str, Any], Weights]  # entries of config.json ("model_type" included), weights by stock name

SHAPES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "norm_eps",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
    }
)
"""Sizes that every class supports."""

TRAINING = frozenset(
    {
        "family",
        "qk_norm_frozen",
        "qk_norm_init",
        "frozen_qk",
        "frozen_mlp",
        "document_mask",
        "dropout",
        "initializer_range",
        "pruning_rank",  # only for `attention: pruned`, which no target supports
    }
)
"""Keys that only matter in training: they do not change the function of a single document."""

PLAIN: dict[str, Any] = {
    "block": "pre_norm",
    "norm": "rmsnorm",
    "norm_bias": False,
    "final_norm": True,
    "skip_gain": 1.0,
    "branch_gain": "fixed",
    "branch_gain_init": 1.0,
    "embedding_projection": False,
    "position_embedding": "rope",
    "mlp": "swiglu",
    "mlp_input_scale": None,
    "parallel": False,
    "attention": "softmax",
    "shaped_gains": "fixed",
    "shaped_temperature": None,
    "qk_norm": "none",
    "attn_logit_softcapping": None,
    "attention_sink": False,
    "attention_gate": "none",
    "value_residual": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "final_logit_softcapping": None,
}
"""The implied value of every other switch in a class that lacks it. Some fold to it: see `fold.folded_config`."""


@dataclass(frozen=True)
class Headroom:
    """Measure how far the stream stays below the constants that a target adds to it."""

    constant_channels: int
    largest: float
    """Largest observed sum of squares of the stream, over tokens and blocks."""
    limit: float
    """2^-12 of the constants' sum of squares, above which norms would no longer be constant."""


class Target:
    """Export decoders to transformers in one way; each target is a line of `TARGETS` (targets.py).

    `refusal` decides which decoders it supports. Every method takes the decoder's original configuration, not a folded
    one.
    """

    is_automatic: ClassVar[bool] = True
    """Whether `--target auto` may choose it."""
    code: ClassVar[tuple[Path, ...]] = ()
    """Code files that are copied into the folder."""

    def refusal(self, config: ModelConfig) -> str | None:
        """Return why it cannot compute a decoder, as a sentence about `the target`, or None if it can."""
        raise NotImplementedError

    def export(self, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
        """Return configuration and weights of a decoder that it supports."""
        raise NotImplementedError

    def folds(self, _config: ModelConfig, multipliers: Multipliers) -> Multipliers:
        """Return the multipliers to fold into the weights; those with a configuration entry have their usual values."""
        return multipliers

    def state_scale(self, config: ModelConfig, multipliers: Multipliers) -> float:
        """Return the ratio of its final states to ours."""
        return state_scale(config, self.folds(config, multipliers))

    def adapt_thinker(
        self, _config: ModelConfig, settings: dict[str, Any], thinker: Weights
    ) -> tuple[dict[str, Any], Weights]:
        """Return the thinker of latent lookahead (thinker.py), adapted to its stream."""
        return settings, thinker

    def headroom(self, _model: CausalLM, _tokens: Tensor) -> Headroom | None:
        """Measure the stream on tokens [B, T] if the target is only exact for small streams, else return None."""
        return None


@dataclass(frozen=True)
class StockClass(Target):
    """Export decoders to one transformers class."""

    build: Callable[[ModelConfig, Weights], Export]
    """Returns its configuration and weights for a folded decoder that it supports."""
    allows: Mapping[str, tuple[Any, ...] | None]
    """Switch -> supported values besides the plain one, or None for any value."""
    whole_heads: bool = False
    """hidden_size must be a multiple of num_attention_heads, head_dim or not."""
    free_head_dim: bool = True
    """head_dim may be other than hidden_size / num_attention_heads."""
    equal_heads: bool = False
    """Every query head has its own key/value head."""
    multiplier_entries: Callable[[Multipliers], dict[str, Any]] | None = None
    """Returns its configuration entries for all four multipliers, or None if it has none and they fold."""
    embedding_scale: Callable[[ModelConfig], float] | None = None
    """Returns its factor on token embeddings, which does not apply to `inputs_embeds`. None: no factor."""

    def export(self, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
        """Fold what the class lacks into the weights, and build its configuration."""
        folded = fold_multipliers(weights, config, self.folds(config, multipliers))
        entries, stock = self.build(folded_config(config), folded)
        if self.multiplier_entries is not None:
            entries |= self.multiplier_entries(multipliers)
        return entries, stock

    def folds(self, config: ModelConfig, multipliers: Multipliers) -> Multipliers:
        """Return all multipliers, or none if the class has entries for them, so that weights can stay as trained."""
        if self.multiplier_entries is None:
            return multipliers
        return Multipliers(attention=1 / math.sqrt(config.head_dim))

    def state_scale(self, config: ModelConfig, multipliers: Multipliers) -> float:
        """Return the ratio of its final states to ours: a tied head undoes the class's embedding scale."""
        scale = super().state_scale(config, multipliers)
        if self.embedding_scale is not None and folded_config(config).tie_word_embeddings:
            scale *= self.embedding_scale(config)
        return scale

    def refusal(self, config: ModelConfig) -> str | None:
        """Return the first switch whose value it does not support, or None."""
        return self.refusal_of_folded(folded_config(config))

    def refusal_of_folded(self, config: ModelConfig) -> str | None:
        """Return the same for a configuration that is already folded."""
        width, heads = config.hidden_size, config.num_attention_heads
        if self.whole_heads and width % heads:
            return (
                "needs model.hidden_size to be a multiple of model.num_attention_heads; this model has "
                f"{width} and {heads}"
            )
        wanted = {key: self.allows.get(key, (plain,)) for key, plain in PLAIN.items()}
        if not self.free_head_dim:
            wanted["head_dim"] = (width // heads,)
        if self.equal_heads:
            wanted["num_key_value_heads"] = (heads,)
        for key, values in wanted.items():
            actual = getattr(config, key)
            if values is not None and actual not in values:
                expected = " or ".join(str(value) for value in values)
                return f"has model.{key} = {expected}; this model has {actual}"
        return None


def llama_entries(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json that most classes share with Llama."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": ACTIVATION_NAMES[config.mlp],
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(config),
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json entry for the rotary embedding."""
    scaling = {"rope_type": "default"} if config.rope_scaling is None else config.rope_scaling.model_dump()
    return {**{key: value for key, value in scaling.items() if value is not None}, "rope_theta": config.rope_theta}


ACTIVATION_NAMES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""`hidden_act` of transformers; gated and plain MLPs differ by their class."""
GATED, UNGATED = ("swiglu", "geglu"), ("gelu", "gelu_tanh", "relu", "relu2")
"""Values of `model.mlp` that transformers classes support."""


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Return the weights with the first matching part of each name replaced."""
    return {_rename(name, names): weight for name, weight in weights.items()}


def _rename(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        if ours in name:
            return name.replace(ours, theirs)
    return name
