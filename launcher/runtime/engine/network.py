"""Compute the bytes that a rank sends per step under each ZeRO stage, and a roofline of arithmetic and messages.

The messages are those of DeepSpeed 0.19.8, which sends more than its settings suggest (docs/performance.md), and of our
replacement at stage 1 in bf16; tests/distributed/test_step_budget.py compares them with the messages of real ranks.
"""

from dataclasses import dataclass

from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.buckets import sums_shares
from plumbline.launcher.runtime.engine.memory import LIVE
from plumbline.model.flops import training_flops_per_token
from plumbline.model.recomputation import Recomputed


@dataclass(frozen=True)
class Messages:
    """Hold the bytes of all large messages of a step, each counted at its full size, before or after sharding."""

    reduced: float
    """By all-reduce."""
    scattered: float
    """By reduce-scatter."""
    gathered: float
    """By all-gather."""

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends over a ring; it receives as many."""
        return (2 * self.reduced + self.scattered + self.gathered) * (ranks - 1) / ranks


def messages(config: Config, parameters: int, stage: int, micro_batches: int) -> Messages:
    """Return the messages that the ranks of a run exchange in a step.

    At stage 3 the gathered weights of a model of up to 1e9 parameters are kept from the first forward pass of a step
    to its update; for a larger model, every pass gathers all of them.

    Args:
        config: the run.
        parameters: number of trained parameters.
        stage: ZeRO stage.
        micro_batches: number per rank and step.
    """
    weights = (2.0 if config.deepspeed.precision == "bf16" and stage > 0 else 4.0) * parameters
    gradients = (2.0 if config.deepspeed.communication_dtype == "bf16" else 4.0) * parameters
    if stage == 0:
        return Messages(gradients, 0.0, 0.0)
    if stage == 1:
        return Messages(0.0, gradients, weights) if sums_shares(config, stage) else Messages(gradients, 0.0, weights)
    if stage == 2:
        return Messages(micro_batches * gradients, 0.0, weights)
    passes = 1 if parameters <= LIVE else 2 * micro_batches
    return Messages(0.0, micro_batches * gradients, passes * weights)


@dataclass(frozen=True)
class Machine:
    """Describe the machine of a roofline."""

    devices: int
    flops: float
    """Floating-point operations per second of one device that training achieves."""
    bandwidth: float
    """Bytes per second that one device sends, and receives at the same time, over the slowest link."""


@dataclass(frozen=True)
class StepTime:
    """Hold the time of a step of the full batch under a ZeRO stage."""

    sent_bytes: float
    """Bytes that each rank sends."""
    compute_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        """Return the time if communication does not overlap with computation."""
        return self.compute_seconds + self.network_seconds


def step_time(config: Config, parameters: int, stage: int, recomputed: Recomputed, machine: Machine) -> StepTime:
    """Return the time of a step: its arithmetic, including recomputation, and its messages.

    Args:
        config: the run.
        parameters: number of trained parameters.
        stage: ZeRO stage.
        recomputed: what the backward pass recomputes; a forward pass is a third of a step. `selective` recomputes no
            matrix products, and is not counted.
        machine: the machine that takes the step.
    """
    flops = training_flops_per_token(config.model, config.data.sequence_length, config.objective)
    again = {"none": 0.0, "selective": 0.0, "full": 1.0}
    share = 1 / recomputed if isinstance(recomputed, int) else again[recomputed]
    work = config.data.batch_plan.tokens_per_step * flops * (1 + share / 3)
    exchanged = messages(config, parameters, stage, config.data.accumulation_steps(machine.devices))
    sent = exchanged.sent(machine.devices)
    return StepTime(sent, work / (machine.devices * machine.flops), sent / machine.bandwidth)


@dataclass(frozen=True)
class Compute:
    """Hold the work and time of a run; for a branch, without its parent."""

    steps: int
    tokens: int
    flops: float
    """FLOPs of training, without recomputation."""
    hours: float
    """Hours of arithmetic, with recomputation."""
    network_hours: float
    """Hours that messages add without overlap."""


def compute(config: Config, plan: RunPlan, step: StepTime) -> Compute:
    """Return the FLOPs of a run, and its hours if every step takes `step`."""
    steps = plan.total_steps - plan.first_step
    tokens = plan.total_tokens - plan.batch_plan.tokens_before(plan.first_step)
    flops = tokens * training_flops_per_token(config.model, config.data.sequence_length, config.objective)
    hours = tokens / config.data.batch_plan.tokens_per_step * step.compute_seconds / 3600
    return Compute(steps, tokens, flops, hours, network_hours=steps * step.network_seconds / 3600)
