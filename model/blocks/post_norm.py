"""Norms on branch outputs, none before them: x + r norm(Attention(x)), then x + r norm(MLP(x)).

OLMo 2 (arXiv 2501.00656) with gains that start at 1, FOG (arXiv 2505.20524) with small ones (`branch_gain_init`).
"""

from torch import Tensor, nn

from plumbline.model.attention import make_attention
from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.mlp import MLP
from plumbline.model.norms import make_norm
from plumbline.model.parameterization.multipliers import Multipliers


class PostNormBlock(nn.Module):
    """One block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__()
        self.self_attn = make_attention(config, multipliers, layer)
        self.post_attention_layernorm = make_norm(config)
        self.attn_residual = Residual(config, multipliers, gain_is_elsewhere=True)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = make_norm(config)
        self.mlp_residual = Residual(config, multipliers, gain_is_elsewhere=True)

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention makes of the stream first: nothing."""
        return x

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        x = self.attn_residual(x, self.post_attention_layernorm(self.self_attn(x, context, cache)))
        return self.mlp_residual(x, self.post_feedforward_layernorm(self.mlp(x)))  # type: ignore[no-any-return]
