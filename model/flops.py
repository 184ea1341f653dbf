"""Count the floating-point operations of training, for MFU and for planning."""

import math

from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.parameterization.table import parameter_shapes
from plumbline.model.parameterization.tensors import Role

MATRICES: tuple[Role, ...] = ("hidden_matrix", "projection")


def training_flops_per_token(config: ModelConfig, sequence_length: int, objective: ObjectiveConfig) -> float:
    """Return the training FLOPs for one token of text: 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B).

    N counts the elements of all matrices and of the head, without the embedding look-ups, as often as the objective
    uses them (`Work`). The attention term counts the full T x T square, as nanoGPT and torchtitan do, although a causal
    kernel computes half of it, and a slot of a thought as a token; recomputation under activation checkpointing is not
    counted (that would be HFU).
    """
    work = objective.work(sequence_length)
    own = sum(
        math.prod(shape)
        for name, shape in parameter_shapes(config, objective, MATRICES).items()
        if name.startswith("objective.")
    )
    head = config.hidden_size * config.vocab_size
    matrices = block_matrices(config) * work.blocks + head * work.head + own
    blocks = config.num_hidden_layers * work.blocks + work.own_blocks
    return 6 * matrices + 12 * blocks * config.num_attention_heads * config.head_dim * sequence_length


def block_matrices(config: ModelConfig) -> int:
    """Return the elements of the matrices that a token meets before the head."""
    return sum(math.prod(shape) for shape in parameter_shapes(config, roles=MATRICES).values())
