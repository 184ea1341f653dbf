"""Estimate the memory of one device under each ZeRO stage, and choose what the backward pass recomputes by it."""

import math
from dataclasses import dataclass, field

from plumbline.launcher.runtime.config.budget import GIB, ParameterCount, state_beyond_adamw
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.activations import activation_bytes
from plumbline.launcher.runtime.engine.buckets import buckets, sends_gradients, sums_shares
from plumbline.launcher.runtime.engine.build import compiles
from plumbline.launcher.runtime.engine.tree_sum import lane_count
from plumbline.launcher.runtime.ranks.collectives import from_main, gather_objects
from plumbline.launcher.runtime.ranks.memory import free_bytes
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import TRAINING
from plumbline.model.recomputation import Recomputed

LEAST_FIRST: tuple[Recomputed, ...] = ("none", "selective", 4, 2, "full")
"""Choices of `train.activation_checkpointing: auto`, by how much the backward pass recomputes."""
FLATTENED = 5 * 10**8
"""Elements that DeepSpeed sums in one message without a bucket size."""
LIVE = 10**9
"""Gathered parameters that DeepSpeed keeps at stage 3, its default."""
FP32, BF16 = 4.0, 2.0
"""Bytes of a number."""
USABLE = 0.9
"""Share of a device's memory that an estimate may fill; the rest is for the allocator and libraries."""


@dataclass(frozen=True)
class DeviceMemory:
    """Hold the peak bytes on one device while it trains."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    """DeepSpeed's communication buffers."""
    activations: float
    update: float = 0.0
    """What summing gradients and updating take after buffers and activations are freed."""
    host: float = 0.0
    """Bytes of host memory that this rank's offloaded optimizer states and the gradients beside them take."""

    @property
    def total(self) -> float:
        """Return the total bytes on the device, without the allocator's slack and the libraries' memory."""
        passing = max(self.buffers + self.activations, self.update)
        return self.weights + self.gradients + self.optimizer + passing


@dataclass(frozen=True)
class Estimate:
    """Estimate the memory of a run on each rank; activations are counted once for each way of recomputing."""

    config: Config
    count: ParameterCount
    ranks: int
    on_gpu: bool = True
    """Whether to count for GPU kernels and messages, rather than those on CPUs."""
    _counted: dict[tuple[bool, Recomputed], int] = field(default_factory=dict)

    def memory(self, stage: int, recomputed: Recomputed) -> DeviceMemory:
        """Return the memory under a ZeRO stage and a way of recomputing."""
        activations = self._activations(stage, recomputed)
        return model_states(self.config, self.count, stage, self.ranks, activations, self.on_gpu)

    def _activations(self, stage: int, recomputed: Recomputed) -> int:
        key = stage == 0 and self.config.deepspeed.precision == "bf16", recomputed
        if key not in self._counted:
            micro_batch = self.config.data.micro_batch(self.ranks)
            self._counted[key] = activation_bytes(self.config, micro_batch, stage, recomputed, self.on_gpu)
        return self._counted[key]

    def recomputed(self, stage: int, device_bytes: float, compiled: bool) -> Recomputed:
        """Return the least recomputation that fits a device under a ZeRO stage, as `auto` chooses it.

        If nothing fits, it is full. Compiled blocks are not recomputed selectively.
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


def choose_recomputed(config: Config, count: ParameterCount, world: World) -> Recomputed:
    """Return what the backward pass of a run recomputes on the devices of a world, and log what `auto` became.

    On CPUs, where ranks share memory with everything else, `auto` is none. Collective if it has to be chosen.
    """
    asked = config.train.activation_checkpointing
    if asked != "auto":
        return asked
    if world.device.type != "cuda":
        return "none"
    room = free_bytes(world)
    if world.size > 1:
        room = min(gather_objects(room, world))
    estimate, stage = Estimate(config, count, world.size), config.deepspeed.zero_stage
    chosen = from_main(lambda: estimate.recomputed(stage, room, compiles(config, world.device)), world)
    if world.is_main:
        total = estimate.memory(stage, chosen).total
        TRAINING.info(
            f"memory   activation checkpointing {chosen}: an estimate of {total / GIB:.1f} GiB, where {room / GIB:.1f} "
            "are free on each device"
        )
    return chosen


def model_states(
    config: Config, count: ParameterCount, stage: int, ranks: int, activations: float, on_gpu: bool = True
) -> DeviceMemory:
    """Return the memory of one of `ranks` devices under ZeRO `stage` (arXiv 1910.02054, section 3) by DeepSpeed.

    Under bf16 the weights are bf16 and the optimizer holds fp32 master weights and two moments; gradients are
    accumulated in fp32, at stage 1 in a full-size buffer on every rank. Stage 0 keeps everything in fp32.
    tests/distributed/test_memory.py compares the result with what ranks allocate.
    """
    case = _Case(config, count, stage, ranks, on_gpu)
    weights = count.total * case.width / (ranks if stage == 3 else 1)
    if config.run.reproducible is None:
        gradients, (buffers, update) = case.gradients(), case.messages()
    else:
        buffers = 0.0
        gradients, update = case.sums_of_a_tree()
    if not case.offloads:
        return DeviceMemory(weights, gradients, case.optimizer(), buffers, activations, update, 0.0)
    # A rank keeps its gradients beside its states; at stage 1 in fp32, also those accumulated so far in the step
    kept = 2 if stage == 1 and not case.mixed and case.accumulates else 1
    return DeviceMemory(
        weights, gradients, 0.0, buffers, activations, update, case.optimizer() + FP32 * kept * case.share
    )


@dataclass(frozen=True)
class _Case:
    """Count the bytes that one rank holds other than weights and activations."""

    config: Config
    count: ParameterCount
    stage: int
    ranks: int
    on_gpu: bool

    @property
    def share(self) -> float:
        """Return the trained parameters per rank where they are sharded."""
        return self.count.trained / self.ranks

    @property
    def mixed(self) -> bool:
        """Return whether weights are bf16, with fp32 master weights in the optimizer."""
        return self.config.deepspeed.precision == "bf16" and self.stage > 0

    @property
    def width(self) -> float:
        """Return the bytes of a weight."""
        return BF16 if self.mixed else FP32

    @property
    def offloads(self) -> bool:
        """Return whether optimizer states are in host memory."""
        return self.config.deepspeed.offload_optimizer and self.stage > 0

    @property
    def accumulates(self) -> bool:
        """Return whether a step has several micro-batches."""
        return self.config.data.accumulation_steps(self.ranks) > 1

    @property
    def reduce_bucket(self) -> float:
        """Return the number of elements of one message of gradients."""
        return buckets(self.config, self.count.trained, self.stage).reduce

    def optimizer(self) -> float:
        """Return the optimizer's bytes, including a moving average of the weights, which is one more fp32 copy."""
        copies = 2 + (self.stage > 0) + (self.config.train.ema_half_life_tokens is not None)
        held = FP32 * copies * self.count.trained + state_beyond_adamw(self.config)
        return held / (1 if self.stage == 0 else self.ranks)

    def gradients(self) -> float:
        """Return the bytes of gradients while micro-batches are processed."""
        if self.stage < 2:
            return FP32 * self.count.trained
        # At stage 2 in fp32, those accumulated so far in the step are kept beside those of this micro-batch
        return FP32 * self.share * (2 if self.stage == 2 and not self.mixed and self.accumulates else 1)

    def messages(self) -> tuple[float, float]:
        """Return the bytes of messages during micro-batches, and of the update after activations are freed."""
        if sums_shares(self.config, self.stage):
            rounded, by_gloo = self._copies() if self.ranks > 1 else (0.0, 0.0)
            return rounded * self.count.trained, (rounded + by_gloo) * self.count.trained
        if self.stage == 0 or (self.stage == 1 and self.mixed):  # one message; about as much when offloaded
            return 0.0, FP32 * min(self.count.trained, FLATTENED) if self.ranks > 1 else 0.0
        if self.stage == 1:  # through a bucket, unless there is one rank, and in one piece in the end
            bucket = FP32 * self.reduce_bucket if sends_gradients(self.config, self.ranks) else 0.0
            return bucket, FP32 * self.share
        if self.stage == 2:  # two alternating buckets, sent in fp32
            return 2 * FP32 * self.reduce_bucket, FP32 * self.share
        # Up to LIVE gathered weights are kept, and they are copied out of messages
        prefetch = buckets(self.config, self.count.trained, self.stage).prefetch
        gathered = min(self.count.total, LIVE) + min(self.count.total, prefetch)
        return FP32 * self.reduce_bucket + self.width * gathered, 0.0

    def _copies(self) -> tuple[float, float]:
        """Return the bytes of rounded copies per gradient element where it is summed in place, and of gloo's copies.

        Rounded ones are made while the backward pass goes on, and all of them are kept until it has ended.
        """
        rounded = BF16 if self.config.deepspeed.communication_dtype == "bf16" else 0.0
        return rounded, 0.0 if self.on_gpu else rounded or FP32

    def sums_of_a_tree(self) -> tuple[float, float]:
        """Return the bytes of gradients under `any_ranks` during micro-batches, and those of the update.

        One sum is pending at each level of this rank's tree (engine/tree_sum.py). In addition there are the gradients
        of the last micro-batch and their fp32 copy; at the end, the whole sum and two buffers of its size for the
        exchange with other ranks.
        """
        lanes = lane_count(self.config.data.accumulation_steps(self.ranks) * self.ranks) // self.ranks
        # A number of ranks that cannot share a tree is refused at start
        waiting = FP32 * self.count.trained * math.log2(max(1, lanes))
        exchange = 3 * FP32 * self.count.trained if self.ranks > 1 else 0.0
        update = max((FP32 + self.width) * self.count.trained, exchange - waiting)
        if self.stage == 2:  # DeepSpeed's own buckets
            unused = self.width * self.reduce_bucket
        else:
            unused = FP32 * self.count.trained if self.stage == 0 or self.mixed or self.ranks == 1 else 0.0
        return waiting + unused + (FP32 * self.share if self.stage > 0 else 0.0), update
