"""Count the floating-point operations of training, for MFU and for planning."""

import math
from collections.abc import Mapping

from plumbline.model.attention import attention_kind
from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.parameterization.skeleton import ModelTensor, model_tensors
from plumbline.model.parameterization.tensors import Role

MATRICES: tuple[Role, ...] = ("hidden_matrix", "projection")


def training_flops_per_token(config: ModelConfig, sequence_length: int, objective: ObjectiveConfig) -> float:
    """Return the training FLOPs for one token of text: 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B).

    N counts the elements of all matrices and of the head, without the embedding look-ups, as often as the objective
    uses them (`Work`; a projection of the embedding, once for each pass of the blocks). A frozen matrix needs no weight
    gradient and counts 4 instead of 6. The attention term counts the full T x T square, as nanoGPT and torchtitan do,
    although a causal kernel computes half of it; with a sliding window of W tokens, T x W, although a mask that is
    written out computes all. It counts a slot of a thought as a token; 12 is `map_flops`. Not counted are recomputation
    under activation checkpointing (that would be HFU), the repeated values of the first block for model.value_residual,
    and the votes of pruned attention.
    """
    work = objective.work(sequence_length)
    tensors = model_tensors(config, objective)
    of_head = {name: tensor for name, tensor in tensors.items() if name.startswith("model.output_projection.")}
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("objective.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in of_head.keys() | own.keys()}
    matrices = _products(rest, config) * work.blocks + _products(own, config)
    head = (_products(of_head, config) + 6 * config.hidden_size * config.vocab_size) * work.head
    blocks = config.num_hidden_layers * work.blocks + work.own_blocks
    channels = config.num_attention_heads * config.head_dim
    keys = min(sequence_length, config.sliding_window or sequence_length)
    return matrices + head + attention_kind(config).map_flops * blocks * channels * keys


def _products(tensors: Mapping[str, ModelTensor], config: ModelConfig) -> int:
    """Return the training FLOPs per token of the matrices among these tensors."""
    matrices = [tensor for tensor in tensors.values() if tensor.rule.role in MATRICES]
    return sum(math.prod(tensor.shape) * (6 if tensor.rule.trains(config) else 4) for tensor in matrices)
