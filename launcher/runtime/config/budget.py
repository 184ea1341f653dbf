"""Estimate what a run will cost before it starts: memory of one device for each ZeRO stage, FLOPs and time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.model.config import ModelConfig
from plumbline.model.flops import training_flops_per_token
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_shapes
from plumbline.model.parameterization.tensors import Role

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Hold the bytes on one device. Model states are counted, activations are estimated."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    host: float = 0.0
    """Bytes of offloaded optimizer states of this device's rank: not on the device, but in the memory of its host."""

    @property
    def total(self) -> float:
        """Return the bytes of all of it, without the allocator's slack and communication buffers."""
        return self.weights + self.gradients + self.optimizer + self.activations


def device_memory(config: Config, parameters: int, stage: int, ranks: int) -> DeviceMemory:
    """Return the memory of one of `ranks` devices under ZeRO `stage` (arXiv 1910.02054, section 3).

    Under bf16 the weights are bf16 and the optimizer holds fp32 master weights and two moments; gradients are
    accumulated in fp32, at stage 1 in a full-size buffer on every rank. Stage 0 keeps everything in fp32. A moving
    average of the weights is one more fp32 copy, held like the optimizer's.
    """
    mixed = config.deepspeed.precision == "bf16" and stage > 0
    weights = parameters * (2.0 if mixed else 4.0)
    gradients = parameters * 4.0
    optimizer = parameters * (8.0 if stage == 0 else 12.0)  # DeepSpeed clones fp32 master weights from stage 1 on
    if config.train.ema_half_life_tokens is not None:
        optimizer += parameters * 4.0
    optimizer += state_beyond_adamw(config)
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        weights /= ranks
    offloaded = config.deepspeed.offload_optimizer and stage > 0
    on_device, host = (0.0, optimizer) if offloaded else (optimizer, 0.0)
    return DeviceMemory(weights, gradients, on_device, activation_bytes(config, ranks), host)


def checkpoint_bytes(config: Config, rows: Sequence[ParameterRow]) -> float:
    """Return the bytes of one checkpoint: fp32 weights, the optimizer's state, and a moving average.

    The same at every ZeRO stage and in every precision.
    """
    total, trained = sum(row.count for row in rows), sum(row.count for row in rows if row.trainable)
    average = 0.0 if config.train.ema_half_life_tokens is None else 4.0 * trained
    return 4.0 * total + 8.0 * trained + state_beyond_adamw(config) + average


def state_beyond_adamw(config: Config) -> float:
    """Return the bytes of optimizer state over AdamW's two fp32 moments, of the whole model; negative for Muon."""
    kind = config.optimizer.kind
    roles: tuple[Role, ...] | None = None if kind.all_tensors else ("hidden_matrix",)
    shapes = parameter_shapes(config.model, config.objective, roles).values()
    return sum(kind.state_beyond_adamw(shape, config.optimizer) for shape in shapes)


def activation_bytes(config: Config, ranks: int = 1) -> float:
    """Estimate the bytes that one micro-batch keeps for the backward pass: inputs and outputs of blocks, MLP, logits.

    Counts the tensors that autograd saves in the pre-norm block with a flash-type attention kernel. With activation
    checkpointing, one block's worth plus the inputs of all blocks. Slots and blocks of the objective count as the
    model's own; the copies of the text's keys and values that thoughts read in every pass come on top.
    """
    model, data, work = config.model, config.data, config.objective.work(config.data.sequence_length)
    width = 2 if config.deepspeed.precision == "bf16" else 4
    text = data.micro_batch(ranks) * data.sequence_length
    tokens = text * work.blocks
    heads = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    mlp = (4 if model.is_gated else 2) * model.intermediate_size
    block: float = tokens * (6 * model.hidden_size + heads + mlp) * width
    if config.precision.weights is not None:  # the backward pass needs rounded weights, whatever ZeRO shards
        block += width * hidden_matrices(model) / model.num_hidden_layers
    stream = tokens * model.hidden_size * width
    layers = model.num_hidden_layers + work.own_blocks
    blocks = block + layers * stream if config.train.activation_checkpointing else layers * block
    logits = min(text * model.vocab_size, 2**25) * 12.0  # one chunk: logits, fp32 copy, gradient
    return blocks + logits


def hidden_matrices(model: ModelConfig) -> int:
    """Return the number of parameters of the linear layers of all blocks."""
    return sum(math.prod(shape) for shape in parameter_shapes(model, roles=("hidden_matrix",)).values())


@dataclass(frozen=True)
class Compute:
    """Hold work and time of a run; of a branch, without its parent."""

    steps: int
    tokens: int
    flops: float
    hours: float


def compute(config: Config, plan: RunPlan, devices: int, tflops: float, mfu: float) -> Compute:
    """Return the FLOPs of a run, and hours on `devices` of `tflops` peak each at an assumed utilisation."""
    steps = plan.total_steps - plan.first_step
    tokens = plan.total_tokens - plan.batches.tokens_before(plan.first_step)
    flops = tokens * training_flops_per_token(config.model, config.data.sequence_length, config.objective)
    return Compute(steps, tokens, flops, flops / (devices * tflops * 1e12 * mfu) / 3600)


@dataclass(frozen=True)
class ParameterCount:
    """Count the parameters of a run."""

    total: int
    non_embedding: int
    """Number of those that scaling laws call N: no embedding, unembedding or objective's own."""


def totals(rows: Sequence[ParameterRow]) -> ParameterCount:
    """Count the parameters of a table."""
    counted = [
        row for row in rows if row.role not in ("embedding", "unembedding") and not row.name.startswith("objective.")
    ]
    return ParameterCount(total=sum(row.count for row in rows), non_embedding=sum(row.count for row in counted))
