"""Wire the pre-norm block: x + r Attention(norm(x)), then x + r MLP(norm(x)); in parallel, both read one norm(x)."""

from torch import Tensor

from plumbline.model.attention import attention_kind
from plumbline.model.attention.context import AttentionContext, LayerCache
from plumbline.model.blocks.kind import Block
from plumbline.model.blocks.residual import Residual
from plumbline.model.config import ModelConfig
from plumbline.model.mlp import MLP
from plumbline.model.norms import make_norm
from plumbline.model.parameterization.multipliers import Multipliers


class PreNormBlock(Block):
    """Run one block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    rotates = True
    no_native_code = None

    def __init__(self, config: ModelConfig, multipliers: Multipliers, layer: int) -> None:
        super().__init__(config, multipliers, layer)
        self.input_layernorm = make_norm(config)
        self.self_attn = attention_kind(config)(config, multipliers, layer)
        self.attn_residual = Residual(config, multipliers)
        self.post_attention_layernorm = None if config.parallel else make_norm(config)
        self.mlp = MLP(config)
        self.mlp_residual = Residual(config, multipliers)

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the normalised stream that attention reads."""
        return self.input_layernorm(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        normed = self.attention_input(x)
        x = self.attn_residual(x, self.self_attn(normed, context, cache))
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x)
        return self.mlp_residual(x, self.mlp(normed))  # type: ignore[no-any-return]
