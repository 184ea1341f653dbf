"""Wire the post-norm block, which normalises branch outputs: x + r norm(Attention(x)), then x + r norm(MLP(x)).

Gains start at 1 in OLMo 2 (arXiv 2501.00656) and small in FOG (arXiv 2505.20524); see `branch_gain_init`.
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


class PostNormBlock(Block):
    """Run one block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    tensors = norm_rules(r"\w+_layernorm", start=lambda model: model.branch_gain_init)
    needs = (NO_SHARED_NORM, GAIN_IN_NORM)
    branch_ends = MappingProxyType({"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"})
    ends_in_norm = tuple(branch_ends)
    no_native_code = None

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        self.self_attn = attention_kind(config)(config, multipliers, layer)
        self.post_attention_layernorm = make_norm(config)
        self.attn_residual = Residual(config, multipliers, gain_is_elsewhere=True)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = make_norm(config)
        self.mlp_residual = Residual(config, multipliers, gain_is_elsewhere=True)

    @classmethod
    def needs_unit_stream(cls, config: ModelConfig) -> bool:
        """Return whether branches are smaller than 1, as in FOG; those of OLMo 2 give the stream their own size."""
        return config.branch_gain_init < 1

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the stream unchanged, since attention reads it directly."""
        return x

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        x = self.attn_residual(x, self.post_attention_layernorm(self.self_attn(x, context, cache)))
        return self.mlp_residual(x, self.post_feedforward_layernorm(self.mlp(x)))  # type: ignore[no-any-return]
