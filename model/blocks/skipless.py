"""Wire the simplified block (arXiv 2311.01906): no skip around attention, and no value and output projections.

SAS:             x = Attention(norm(x)), then x + b MLP(norm(x))
SAS-P, parallel: x = Attention(norm(x)) + b MLP(norm(x)): no skip at all

The identity in shaped attention carries the stream instead of the skip, and what the map adds to it is scaled with
depth, as a branch beside a skip is. Without that a rate that is tuned at 4 layers collapses all tokens of a sequence
into one at 32. The stream also passes through the gains of the norm and of the identity in every block, so these are
scaled as what multiplies over the blocks. Values are the normed stream itself, except in the first block, which keeps
its value projection. Through that the whole stream passes, but once, so it is not scaled with depth.
"""

from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.attention.shaped import ShapedAttention
from plumbline.model.blocks.kind import Block
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.kinds import Need
from plumbline.model.mlp import MLP
from plumbline.model.norms import make_norm
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import norm_rules


class SkiplessBlock(Block):
    """Run one block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    needs = (
        Need({"attention": ("shaped",)}, "loses the tokens' identity without the shaped map's identity"),
        Need({"attention_gate": ("none",), "value_residual": (False,)}, "has no values of its own"),
    )
    tensors = (*norm_rules("input_layernorm", on_stream=True), *norm_rules("post_attention_layernorm"))
    branch_ends = MappingProxyType({"mlp": "mlp.down_proj"})  # attention is not a branch beside a stream
    map_is_branch = True
    no_native_code = None

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        self.input_layernorm = make_norm(config)
        self.self_attn = ShapedAttention(config, multipliers, layer, values=layer == 0, output=False)
        self.self_attn.residual = multipliers.residual
        if layer == 0:  # the whole stream passes through its value projection, once at every depth
            rules = self.self_attn.tensors
            self.self_attn.tensors = tuple(replace(r, repeats=r.repeats and "v_proj" not in r.name) for r in rules)
        self.post_attention_layernorm = None if config.parallel else make_norm(config)
        self.mlp = MLP(config)
        self.mlp_residual = Residual(config, multipliers)

    @classmethod
    def check_shape(cls, config: ModelConfig) -> None:
        """Refuse heads that do not divide the stream evenly into values."""
        inner = config.num_attention_heads * config.head_dim
        if not config.num_attention_heads == config.num_key_value_heads or inner != config.hidden_size:
            raise ValueError(
                "block = skipless takes the stream itself as values: num_key_value_heads "
                f"({config.num_key_value_heads}) must equal num_attention_heads ({config.num_attention_heads}), and "
                f"num_attention_heads x head_dim ({inner}) must equal hidden_size ({config.hidden_size})"
            )

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the normalised stream that attention reads."""
        return self.input_layernorm(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        normed = self.attention_input(x)
        x = self.self_attn(normed, context, cache)
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x)
        return self.mlp_residual(x, self.mlp(normed))  # type: ignore[no-any-return]
