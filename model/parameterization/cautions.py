"""Warn of settings of the parameterization that are allowed but misleading."""

from collections.abc import Iterator
from fractions import Fraction

from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig, gated_width
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.own_factors import OwnFactors
from plumbline.model.parameterization.sizes import sizes

LEAST_STREAM = 0.1
"""RMS of the embedding's output below which it is far from a unit size."""


def cautions(model: ModelConfig, config: ParameterizationConfig) -> Iterator[str]:
    """Yield warnings, a sentence each."""
    size = sizes(model, config)
    if config.scales_width and config.base_head_dim is None and _head_dim_may_have_grown(model, config, size.width):
        yield (
            f"parameterization.base_head_dim is not given, so attention keeps its scale of 1/sqrt({model.head_dim}), "
            f"but {model.num_attention_heads} heads at {size.width:.4g} times the base's width may be wider than the "
            f"base's: set base_head_dim to the width of its heads (base_head_dim={model.head_dim} if it was the same)"
        )
    yield from _assumed_bases(model, config)
    own = OwnFactors("init_multipliers", config.init_multipliers).of("model.embed_tokens.weight", "embedding")
    stream = model.initializer_range * own * config.embedding_multiplier
    if block_kind(model).needs_unit_stream(model) and 0 < stream < LEAST_STREAM:
        yield (
            f"model.block = {model.block} reads the stream without a norm, and the embedding starts it at {stream:g} "
            "(model.initializer_range x parameterization.embedding_multiplier, and init_multipliers of the embedding): "
            "such blocks were made for a stream of unit size; set "
            f"parameterization.embedding_multiplier={config.embedding_multiplier / stream:g}"
        )
    if size.depth != 1.0 and size.alpha < 1.0 and block_kind(model).ends_in_norm:
        yield (
            f"parameterization.depth_alpha = {size.alpha:g} with model.block = {model.block}: its branches end in a "
            "norm, so where they agree the stream grows as m_L^(1 - depth_alpha); use rule: completep"
        )


def _assumed_bases(model: ModelConfig, config: ParameterizationConfig) -> Iterator[str]:
    """Yield a warning for each size that may not have grown with the width, though the table takes it to have.

    These are sizes of which the base would have had a fraction, and key/value heads that may have stayed as many while
    the query heads grew, as in most published families with grouped queries.
    """
    if not config.scales_width or config.base_hidden_size in (None, model.hidden_size):
        return
    grown = Fraction(config.base_hidden_size, model.hidden_size)
    heads_grown = grown * Fraction(model.head_dim, config.base_head_dim or model.head_dim)
    queries, shared = model.num_attention_heads, model.num_key_value_heads
    base_queries = Fraction(config.base_num_attention_heads or queries * heads_grown)
    # Where each query has its own key, a fraction of a head is that of the warning about base_head_dim
    told_of_heads = shared == queries and config.base_head_dim is None
    may_have_stayed = shared < base_queries and base_queries % shared == 0
    if config.base_num_key_value_heads is None and not told_of_heads:
        base = shared * heads_grown
        if base.denominator != 1 or (shared < queries and may_have_stayed):
            yield _assumption("num_key_value_heads", shared, base)
    base = model.intermediate_size * grown
    rounded = model.intermediate_size == gated_width(model.hidden_size)  # so was the base's, to about the same ratio
    if config.base_intermediate_size is None and base.denominator != 1 and not rounded:
        yield _assumption("intermediate_size", model.intermediate_size, base)


def _assumption(key: str, size: int, base: Fraction) -> str:
    return (
        f"parameterization.base_{key} is not given, so model.{key} = {size} counts as grown with hidden_size from "
        f"{float(base):.4g} at the base: set base_{key} to the base's own (base_{key}={size} if it was the same)"
    )


def _head_dim_may_have_grown(model: ModelConfig, config: ParameterizationConfig, width: float) -> bool:
    """Return whether an unchanged head width would imply an unlikely base: a fraction of a head, or a single one."""
    if config.base_num_attention_heads is not None:
        return model.num_attention_heads != config.base_num_attention_heads * width
    heads = model.num_attention_heads / width
    return width != 1.0 and (heads < 2 or not heads.is_integer())
