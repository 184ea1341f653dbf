"""Normalisation layers: PyTorch's own, chosen by the config."""

from torch import nn

from model.config import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm over the residual stream, [..., hidden_size] -> [..., hidden_size]."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


def make_head_norm(config: ModelConfig) -> nn.Module:
    """QK-norm: RMSNorm over each head, [..., head_dim] -> [..., head_dim], one gain vector shared by all heads."""
    return nn.RMSNorm(config.head_dim, eps=config.norm_eps)
