"""Floating-point operations of training, for MFU and for planning."""

import math

from model.config import ModelConfig
from model.parameterization import parameter_shapes
from model.roles import role_of


def matrix_parameters(config: ModelConfig) -> int:
    """Parameters that multiply an activation: all matrices and the head, without the embedding look-ups."""
    shapes = parameter_shapes(config).items()
    hidden = sum(math.prod(shape) for name, shape in shapes if role_of(name) in ("hidden_matrix", "projection"))
    return hidden + config.hidden_size * config.vocab_size


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Forward and backward FLOPs of one token: 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B).

    N is `matrix_parameters`. The attention term counts the full T x T square, as nanoGPT and torchtitan do, although a
    causal kernel computes half of it; recomputation under activation checkpointing is not counted (that would be HFU).
    """
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence_length
    return 6 * matrix_parameters(config) + attention
