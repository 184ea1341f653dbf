"""Build normalisation layers according to the config: PyTorch's own or the single-scale one."""

from collections.abc import Callable

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


NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "rmsnorm": lambda config: nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
    "layernorm": lambda config: nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias),
    "single_scale_rmsnorm": lambda config: SingleScaleRMSNorm(config.hidden_size, config.norm_eps),
}


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm over the residual stream, [..., hidden_size] -> [..., hidden_size]."""
    return NORMS[config.norm](config)


def make_head_norm(config: ModelConfig) -> nn.Module:
    """Return QK-norm over each head, [..., head_dim] -> [..., head_dim], one gain vector shared by all heads."""
    return nn.RMSNorm(config.head_dim, eps=config.norm_eps)
