"""Compute how much larger a model is than the base at which its hyperparameters were tuned."""

from dataclasses import dataclass, replace

from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.config import ParameterizationConfig


@dataclass(frozen=True)
class Sizes:
    """Hold the ratios of the model's sizes to the base's, as far as the rule uses them. All are 1 under sp."""

    width: float
    """m_N: width of the residual stream."""
    depth: float
    """m_L, or 1 if the rule does not scale with depth."""
    alpha: float
    """Depth exponent, or 1 (which leaves every depth factor at 1) if the rule does not scale with depth."""
    query: float
    """Query heads x head_dim: output of q_proj, input of o_proj."""
    key_value: float
    """Key/value heads x head_dim: output of k_proj and v_proj."""
    head_dim: float
    """Width of one head."""
    heads: float
    """Query heads."""
    gate: float
    """Outputs of the attention's gate: one per query head, or one per channel of each head."""
    intermediate: float
    """Inner width of the MLP."""

    @property
    def fixed(self) -> float:
        """Return the ratio for dimensions that do not grow: 1."""
        return 1.0

    def outside_the_stack(self) -> "Sizes":
        """Return the sizes for modules outside the decoder's stack, whose number does not grow with depth."""
        return replace(self, depth=1.0, alpha=1.0)


def sizes(model: ModelConfig, config: ParameterizationConfig) -> Sizes:
    """Return the ratios of `model` to the base, as the rule sees them."""
    if not config.scales_width or config.base_hidden_size is None:
        return Sizes(
            width=1.0,
            depth=1.0,
            alpha=1.0,
            query=1.0,
            key_value=1.0,
            head_dim=1.0,
            heads=1.0,
            gate=1.0,
            intermediate=1.0,
        )
    width = model.hidden_size / config.base_hidden_size
    depth = alpha = 1.0
    if config.scales_depth and config.base_num_hidden_layers is not None:
        depth, alpha = model.num_hidden_layers / config.base_num_hidden_layers, config.depth_alpha
    head_dim = model.head_dim / (config.base_head_dim or model.head_dim)

    def ratio(size: int, base: int | None, head_dim: float = 1.0) -> float:
        return width if base is None else size / base * head_dim

    query = ratio(model.num_attention_heads, config.base_num_attention_heads, head_dim)
    heads = query / head_dim
    return Sizes(
        width=width,
        depth=depth,
        alpha=alpha,
        query=query,
        key_value=ratio(model.num_key_value_heads, config.base_num_key_value_heads, head_dim),
        head_dim=head_dim,
        heads=heads,
        gate=heads if model.attention_gate == "head" else query,
        intermediate=ratio(model.intermediate_size, config.base_intermediate_size),
    )
