"""Estimate the memory of one device under each ZeRO stage, and choose by it what the backward pass computes again."""

import math
from dataclasses import dataclass, field

from plumbline.launcher.runtime.config.budget import GIB, state_beyond_adamw
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.activations import activation_bytes
from plumbline.launcher.runtime.engine.buckets import buckets, sends_gradients
from plumbline.launcher.runtime.engine.build import compiles
from plumbline.launcher.runtime.engine.tree_sum import lane_count
from plumbline.launcher.runtime.system.collectives import from_main, gather_objects
from plumbline.launcher.runtime.system.log import TRAINING
from plumbline.launcher.runtime.system.memory import free_bytes
from plumbline.launcher.runtime.system.world import World
from plumbline.model.recomputation import Recomputed

LEAST_FIRST: tuple[Recomputed, ...] = ("none", "selective", 4, 2, "full")
"""What `train.activation_checkpointing: auto` chooses from, by what the backward pass computes again."""
FLATTENED = 5 * 10**8
"""Elements that DeepSpeed sums in one message where it has no bucket size."""
LIVE = 10**9
"""Gathered parameters that DeepSpeed keeps at stage 3, its default."""
USABLE = 0.9
"""Share of a device's memory that an estimate may fill: the rest is the allocator's and the libraries'."""


@dataclass(frozen=True)
class DeviceMemory:
    """Hold the bytes on one device while it trains, at the most."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    """What DeepSpeed sends and receives in."""
    activations: float
    update: float = 0.0
    """What sums of gradients and updates take in place of buffers and activations, when these are gone."""
    host: float = 0.0
    """Bytes of offloaded optimizer states of this device's rank, and of gradients beside them: in its host's memory."""

    @property
    def total(self) -> float:
        """Return the bytes of all of it on the device, without the allocator's slack and the libraries' own."""
        passing = max(self.buffers + self.activations, self.update)
        return self.weights + self.gradients + self.optimizer + passing


@dataclass(frozen=True)
class Estimate:
    """Estimate what a run takes on each of some ranks; every way through the model is counted once."""

    config: Config
    parameters: int
    ranks: int
    on_gpu: bool = True
    """Count what kernels and messages on GPUs keep, not those on CPUs."""
    _counted: dict[tuple[bool, Recomputed], int] = field(default_factory=dict)

    def memory(self, stage: int, recomputed: Recomputed) -> DeviceMemory:
        """Return the memory under a ZeRO stage and a way of recomputing."""
        activations = self._activations(stage, recomputed)
        return model_states(self.config, self.parameters, stage, self.ranks, activations, self.on_gpu)

    def _activations(self, stage: int, recomputed: Recomputed) -> int:
        key = stage == 0 and self.config.deepspeed.precision == "bf16", recomputed
        if key not in self._counted:
            micro_batch = self.config.data.micro_batch(self.ranks)
            self._counted[key] = activation_bytes(self.config, micro_batch, stage, recomputed, self.on_gpu)
        return self._counted[key]

    def recomputed(self, stage: int, device_bytes: float, compiled: bool) -> Recomputed:
        """Return what is computed again under a ZeRO stage: of what `auto` may choose, the least that fits a device.

        Where nothing fits it is all. Compiled blocks are not recomputed selectively.
        """
        asked = self.config.train.activation_checkpointing
        if asked != "auto":
            return asked
        for choice in LEAST_FIRST:
            if choice == "selective" and compiled:
                continue
            if self.memory(stage, choice).total <= USABLE * device_bytes:
                return choice
        return "full"


def choose_recomputed(config: Config, parameters: int, world: World) -> Recomputed:
    """Return what the backward pass of a run computes again on the devices of a world, and tell what `auto` became.

    On CPUs, whose memory ranks share with all else, `auto` is none. Collective where it has to be chosen.
    """
    asked = config.train.activation_checkpointing
    if asked != "auto":
        return asked
    if world.device.type != "cuda":
        return "none"
    room = free_bytes(world)
    if world.size > 1:
        room = min(gather_objects(room, world))
    estimate, stage = Estimate(config, parameters, world.size), config.deepspeed.zero_stage
    chosen = from_main(lambda: estimate.recomputed(stage, room, compiles(config, world.device)), world)
    if world.is_main:
        total = estimate.memory(stage, chosen).total
        TRAINING.info(
            f"memory   activation checkpointing {chosen}: an estimate of {total / GIB:.1f} GiB, where {room / GIB:.1f} "
            "are free on each device"
        )
    return chosen


def model_states(
    config: Config, parameters: int, stage: int, ranks: int, activations: float, on_gpu: bool = True
) -> DeviceMemory:
    """Return the memory of one of `ranks` devices under ZeRO `stage` (arXiv 1910.02054, section 3) by DeepSpeed.

    Under bf16 the weights are bf16 and the optimizer holds fp32 master weights and two moments; gradients are
    accumulated in fp32, at stage 1 in a full-size buffer on every rank. Stage 0 keeps everything in fp32. A moving
    average of the weights is one more fp32 copy, held like the optimizer's. tests/distributed/test_memory.py compares
    it with what ranks allocate.
    """
    mixed = config.deepspeed.precision == "bf16" and stage > 0
    width = 2.0 if mixed else 4.0
    share, weights, optimizer = parameters / ranks, parameters * width, parameters * (8.0 if stage == 0 else 12.0)
    if config.train.ema_half_life_tokens is not None:
        optimizer += parameters * 4.0
    optimizer += state_beyond_adamw(config)
    gradients, sizes = parameters * 4.0, buckets(config, parameters, stage)
    offloads = config.deepspeed.offload_optimizer and stage > 0
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2:
        gradients /= ranks
        if not mixed and stage == 2 and config.data.accumulation_steps(ranks) > 1:
            gradients *= 2  # of the step so far, and of this micro-batch
    if stage >= 3:
        weights /= ranks
    if config.run.reproducible is not None:
        waiting, update = _sums_of_a_tree(config, parameters, ranks, width)
        # What DeepSpeed has for its own sums
        unused = width * sizes.reduce if stage == 2 else 4.0 * parameters * (stage == 0 or mixed or ranks == 1)
        gradients, buffers = waiting + unused + 4.0 * share * (stage > 0), 0.0
    elif stage == 1 and mixed and not offloads:  # gradients are summed where they lie; rounded ones are copied
        rounded = config.deepspeed.communication_dtype == "bf16"
        copies = 2.0 * rounded + (0.0 if on_gpu else 2.0 if rounded else 4.0)  # gloo copies every message
        buffers, update = 0.0, copies * parameters if ranks > 1 else 0.0
    elif stage == 0 or (stage == 1 and mixed):  # in one piece, once activations are gone; offloaded, about as much
        buffers, update = 0.0, 4.0 * min(parameters, FLATTENED) if ranks > 1 else 0.0
    elif stage == 1:  # gradients go through a bucket, but for those of a rank alone, and lie in one piece in the end
        buffers, update = 4.0 * sizes.reduce if sends_gradients(config, ranks) else 0.0, 4.0 * share
    elif stage == 2:  # two buckets take turns, and what is sent is fp32
        buffers, update = (8.0 if mixed else 2 * width) * sizes.reduce, 4.0 * share
    else:  # gathered weights stay while fewer are there than DeepSpeed lets live, and are copied out of messages
        gathered = min(parameters, LIVE) + min(parameters, sizes.prefetch)
        buffers, update = 4.0 * sizes.reduce + width * gathered, 0.0
    host = 0.0
    if offloads:
        # A rank's gradients lie beside its states, at stage 1 in fp32 those of the step so far as well
        accumulates = stage == 1 and not mixed and config.data.accumulation_steps(ranks) > 1
        host, optimizer = optimizer + 4.0 * share * (2 if accumulates else 1), 0.0
    return DeviceMemory(weights, gradients, optimizer, buffers, activations, update, host)


def _sums_of_a_tree(config: Config, parameters: int, ranks: int, width: float) -> tuple[float, float]:
    """Return what `any_ranks` holds of sums while a micro-batch passes, and the most that it holds between two.

    A sum waits at each level of this rank's tree (engine/tree_sum.py). Beside them come the gradients of the last
    micro-batch and their fp32 copy; in the end the whole sum, and two of its size for the exchange with other ranks.
    """
    lanes = lane_count(config.data.accumulation_steps(ranks) * ranks) // ranks
    waiting = 4.0 * parameters * math.log2(max(1, lanes))  # ranks that cannot share a tree are refused when they start
    exchange = 12.0 * parameters if ranks > 1 else 0.0
    return waiting, max((4.0 + width) * parameters, exchange - waiting)
