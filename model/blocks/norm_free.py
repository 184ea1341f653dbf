"""The norm-free block of Outlier Protected models (arXiv 2405.19279): x + b Attention(x), then x + b MLP(x).

Norms make outlier features; without them small branches keep the stream's size, and QK-norm or a cap keeps that of the
attention logits. The same wiring with shaped attention and shaped ReLU is the Shaped Transformer (arXiv 2306.17759).
"""

from torch import Tensor, nn

from plumbline.model.attention import make_attention
from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.mlp import MLP
from plumbline.model.parameterization.multipliers import Multipliers


class NormFreeBlock(nn.Module):
    """One block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__()
        self.self_attn = make_attention(config, multipliers, layer)
        self.attn_residual = Residual(config, multipliers)
        self.mlp = MLP(config)
        self.mlp_residual = Residual(config, multipliers)

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention makes of the stream first: nothing."""
        return x

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        x = self.attn_residual(x, self.self_attn(x, context, cache))
        return self.mlp_residual(x, self.mlp(x))  # type: ignore[no-any-return]
