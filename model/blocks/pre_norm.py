"""The pre-norm block: x + r * Attention(norm(x)), then x + r * MLP(norm(x)).

r is the parameterization's residual multiplier (CompleteP: m_L^-alpha, arXiv 2505.01618 Table 1). It multiplies the
whole branch output, after the projection's bias and after dropout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attention, AttentionContext, LayerCache
from model.config import ModelConfig
from model.mlp import MLP
from model.multipliers import Multipliers
from model.norms import make_norm


class PreNormBlock(nn.Module):
    """One block, [B, T, hidden_size] -> [B, T, hidden_size]."""

    def __init__(self, config: ModelConfig, multipliers: Multipliers) -> None:
        super().__init__()
        self.residual_multiplier = multipliers.residual
        self.dropout = config.dropout
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, scale=multipliers.attention)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """X + r * dropout(branch), as one kernel; exactly x + branch when r is 1."""
        return torch.add(x, F.dropout(branch, self.dropout, self.training), alpha=self.residual_multiplier)

    def forward(self, x: Tensor, context: AttentionContext, cache: LayerCache | None = None) -> Tensor:
        """Pass the residual stream x through both branches."""
        x = self._add(x, self.self_attn(self.input_layernorm(x), context, cache))
        return self._add(x, self.mlp(self.post_attention_layernorm(x)))
