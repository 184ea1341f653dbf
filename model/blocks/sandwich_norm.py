"""Wire the block with norms around each branch: x + r norm(Attention(norm(x))), then x + r norm(MLP(norm(x))).

This is known as sandwich norm or Peri-LN (arXiv 2502.02732). Gemma 2 uses it, and the norms have its names.
"""

from types import MappingProxyType

from torch import Tensor

from plumbline.model.attention import attention_kind
from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.blocks.kind import GAIN_IN_NORM, NO_SHARED_NORM, Block
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.mlp import MLP
from plumbline.model.norms import make_norm
from plumbline.model.parameterization.multipliers import Multipliers
from plumbline.model.parameterization.tensors import norm_rules


class SandwichNormBlock(Block):
    """Run one block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    tensors = (
        *norm_rules("(input|pre_feedforward)_layernorm"),
        *norm_rules("post_(attention|feedforward)_layernorm", start=lambda model: model.branch_gain_init),
    )
    needs = (NO_SHARED_NORM, GAIN_IN_NORM)
    branch_ends = MappingProxyType({"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"})
    ends_in_norm = tuple(branch_ends)
    no_native_code = None

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        self.input_layernorm = make_norm(config)
        self.self_attn = attention_kind(config)(config, multipliers, layer)
        self.post_attention_layernorm = make_norm(config)
        self.attn_residual = Residual(config, multipliers, gain_is_elsewhere=True)
        self.pre_feedforward_layernorm = make_norm(config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = make_norm(config)
        self.mlp_residual = Residual(config, multipliers, gain_is_elsewhere=True)

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the normalised stream that attention reads."""
        return self.input_layernorm(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        attended = self.self_attn(self.attention_input(x), context, cache)
        x = self.attn_residual(x, self.post_attention_layernorm(attended))
        branch = self.mlp(self.pre_feedforward_layernorm(x))
        return self.mlp_residual(x, self.post_feedforward_layernorm(branch))  # type: ignore[no-any-return]
