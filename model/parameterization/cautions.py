"""Warn of settings of the parameterization that are allowed but misleading."""

from collections.abc import Iterator

from plumbline.model.blocks import block_kind
from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.sizes import sizes


def cautions(model: ModelConfig, config: ParameterizationConfig) -> Iterator[str]:
    """Yield warnings, a sentence each."""
    size = sizes(model, config)
    if config.scales_width and config.base_head_dim is None and _head_dim_may_have_grown(model, config, size.width):
        yield (
            f"parameterization.base_head_dim is not given, so attention keeps its scale of 1/sqrt({model.head_dim}), "
            f"but {model.num_attention_heads} heads at {size.width:.4g} times the base's width may be wider than the "
            f"base's: set base_head_dim to the width of its heads (base_head_dim={model.head_dim} if it was the same)"
        )
    if size.depth != 1.0 and size.alpha < 1.0 and block_kind(model).ends_in_norm:
        yield (
            f"parameterization.depth_alpha = {size.alpha:g} with model.block = {model.block}: its branches end in a "
            "norm, so where they agree the stream grows as m_L^(1 - depth_alpha); use rule: completep"
        )


def _head_dim_may_have_grown(model: ModelConfig, config: ParameterizationConfig, width: float) -> bool:
    """Return whether an unchanged head width would imply an unlikely base: a fraction of a head, or a single one."""
    if config.base_num_attention_heads is not None:
        return model.num_attention_heads != config.base_num_attention_heads * width
    heads = model.num_attention_heads / width
    return width != 1.0 and (heads < 2 or not heads.is_integer())
