"""Fold forward multipliers into weights, so that a stock architecture without multipliers computes the same function.

All in fp32 and exact in real arithmetic. Folded weights are for inference: AdamW on them is no longer the scaled
optimizer of the parameterization.
"""

import math

from torch import Tensor

from model.config import ModelConfig
from model.multipliers import Multipliers

Weights = dict[str, Tensor]


def fold_multipliers(weights: Weights, config: ModelConfig, multipliers: Multipliers) -> Weights:
    """Weights of the same decoder with the standard attention scale 1/sqrt(head_dim) and all other multipliers 1.

    Args:
        weights: fp32 weights by name; a tied head has no entry.
        config: the decoder's shape.
        multipliers: what its forward pass applies.
    """
    attention = multipliers.attention * math.sqrt(config.head_dim)  # relative to the stock scale
    factors = {
        "self_attn.o_proj": multipliers.residual,
        "mlp.down_proj": multipliers.residual,
        # With QK-norm a factor on q_proj would be normalised away; the norm's gain comes after
        "self_attn.q_norm" if config.qk_norm == "head" else "self_attn.q_proj": attention,
        "model.embed_tokens": multipliers.embedding,
        "model.embed_positions": multipliers.embedding,
    }
    if config.tie_word_embeddings:
        # The shared matrix carries the embedding multiplier, so the head undoes it, in the norm before it
        factors["model.norm"] = multipliers.output / multipliers.embedding
    else:
        factors["lm_head"] = multipliers.output
    return {name: weight * _factor(name, factors) for name, weight in weights.items()}


def _factor(name: str, factors: dict[str, float]) -> float:
    module = name.rpartition(".")[0]
    return math.prod(factor for suffix, factor in factors.items() if module == suffix or module.endswith("." + suffix))
