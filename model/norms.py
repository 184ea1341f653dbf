"""Build normalisation layers: PyTorch's own or the single-scale one, as the config says."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.config import ModelConfig


class SingleScaleRMSNorm(nn.Module):
    """Normalise with one gain for all channels, so that no channel is privileged (arXiv 2506.19697)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        return F.rms_norm(x, (self.size,), eps=self.eps) * self.scale


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm over the residual stream, [..., hidden_size] -> [..., hidden_size]."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
    if config.norm == "single_scale_rmsnorm":
        return SingleScaleRMSNorm(config.hidden_size, config.norm_eps)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


def make_head_norm(config: ModelConfig) -> nn.Module:
    """Return QK-norm over each head, [..., head_dim] -> [..., head_dim], one gain vector shared by all heads."""
    return nn.RMSNorm(config.head_dim, eps=config.norm_eps)
