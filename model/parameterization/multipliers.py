"""Compute the constants through which a parameterization touches the forward pass."""

import math
from dataclasses import dataclass, replace

from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.sizes import sizes


@dataclass(frozen=True)
class Multipliers:
    """Hold the forward multipliers of one model; `multipliers` computes them, the decoder applies them."""

    attention: float
    """Scale of the attention logits."""
    embedding: float = 1.0
    """Multiplies the embedding's output."""
    residual: float = 1.0
    """Multiplies every branch before it is added to the residual stream."""
    output: float = 1.0
    """Multiplies the logits (before any soft cap)."""
    skip: float = 1.0
    """Multiplies the residual stream wherever a branch is added to it."""

    def outside_the_stack(self, model: ModelConfig) -> "Multipliers":
        """Return the multipliers for blocks outside the decoder's stack, which are not scaled with depth."""
        return replace(self, residual=1.0, skip=model.skip_gain)


def multipliers(model: ModelConfig, config: ParameterizationConfig) -> Multipliers:
    """Return the forward constants: attention logit scale, embedding, residual, output and skip multipliers.

    A skip gain g below 1 leaves g^L of the embedding after L blocks. It scales as g^(1/m_L), so that g^L is the same as
    at the base, and a branch's weight relative to the stream is given by its own multiplier at every depth.
    """
    size = sizes(model, config)
    absorbed = config.output_scaling == "absorbed"
    base_head_dim = config.base_head_dim if config.scales_width and config.base_head_dim else model.head_dim
    # 1/head_dim up to a constant, so that it is 1/sqrt(head_dim) exactly at the base
    attention = (1 / math.sqrt(model.head_dim)) * math.sqrt(base_head_dim / model.head_dim)
    if model.shaped_temperature is not None:
        # The base's width: trained queries and keys agree as much at any width (rule sp takes the model's own)
        attention /= model.shaped_temperature * math.sqrt(model.hidden_size / size.width)
    return Multipliers(
        attention=attention,
        embedding=config.embedding_multiplier,
        residual=size.depth**-size.alpha,
        output=config.output_multiplier / (config.gamma_0 * (1.0 if absorbed else size.width)),
        skip=model.skip_gain ** (1 / size.depth),
    )
