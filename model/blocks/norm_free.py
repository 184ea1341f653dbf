"""Wire the norm-free block of Outlier Protected models (arXiv 2405.19279): x + b Attention(x), then x + b MLP(x).

The paper holds that norms before branches cause outlier features. Without them, small branches limit the size of the
stream, and QK-norm or a cap that of the attention logits. The same wiring with shaped attention and shaped ReLU is the
Shaped Transformer (arXiv 2306.17759).
"""

from torch import Tensor

from plumbline.model.attention import attention_kind
from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.blocks.kind import NO_SHARED_NORM, Block
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.mlp import MLP
from plumbline.model.parameterization.multipliers import Multipliers


class NormFreeBlock(Block):
    """Run one block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    needs = (NO_SHARED_NORM,)
    no_native_code = None

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        self.self_attn = attention_kind(config)(config, multipliers, layer)
        self.attn_residual = Residual(config, multipliers)
        self.mlp = MLP(config)
        self.mlp_residual = Residual(config, multipliers)

    @classmethod
    def needs_unit_stream(cls, _config: ModelConfig) -> bool:
        """Return True: nothing else gives the branches' inputs a size."""
        return True

    @classmethod
    def cautions(cls, config: ModelConfig) -> list[str]:
        """Warn of unbounded attention logits."""
        if not attention_kind(config).has_unregulated_logits(config):
            return []
        return [
            "model.block = norm_free without model.qk_norm or model.attn_logit_softcapping: attention logits are "
            "unregulated, and such training was seen to blow up (arXiv 2405.19279)"
        ]

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the stream unchanged, since attention reads it directly."""
        return x

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        x = self.attn_residual(x, self.self_attn(x, context, cache))
        return self.mlp_residual(x, self.mlp(x))  # type: ignore[no-any-return]
