"""Say what a rank sends in a step under each ZeRO stage, and how long a step takes with it: a roofline of two roofs.

What is sent follows what DeepSpeed 0.19.8 does, which is more than its settings say (docs/performance.md), and what is
done in its place at stage 1 in bf16; tests/distributed/test_step_budget.py compares it with the messages of real ranks.
"""

from dataclasses import dataclass

from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.memory import LIVE
from plumbline.model.flops import training_flops_per_token
from plumbline.model.recomputation import Recomputed


@dataclass(frozen=True)
class Messages:
    """Hold the bytes of all large messages of a step, each counted whole, as it is before or after it is divided."""

    reduced: float
    """Summed, and handed to every rank."""
    scattered: float
    """Summed, of which each rank gets a part."""
    gathered: float
    """Put together from the parts of all ranks."""

    def sent(self, ranks: int) -> float:
        """Return the bytes that each rank sends over a ring, which is as many as it receives."""
        return (2 * self.reduced + self.scattered + self.gathered) * (ranks - 1) / ranks


def messages(config: Config, parameters: int, stage: int, micro_batches: int) -> Messages:
    """Return what the ranks of a run exchange in a step.

    At stage 3 gathered weights stay while fewer than 1e9 are there, from the first forward pass of a step to its
    update; of a larger model, every pass gathers all of them.

    Args:
        config: the run.
        parameters: that are trained.
        stage: of ZeRO.
        micro_batches: of each rank in a step.
    """
    weights = (2.0 if config.deepspeed.precision == "bf16" and stage > 0 else 4.0) * parameters
    gradients = (2.0 if config.deepspeed.communication_dtype == "bf16" else 4.0) * parameters
    if stage == 0:
        return Messages(gradients, 0.0, 0.0)
    if stage == 1:
        # In bf16 each rank gets its own share, unless states are offloaded (zero_shards.sum_where_gradients_lie)
        divides = config.deepspeed.precision == "bf16" and not config.deepspeed.offload_optimizer
        return Messages(0.0, gradients, weights) if divides else Messages(gradients, 0.0, weights)
    if stage == 2:
        return Messages(micro_batches * gradients, 0.0, weights)
    passes = 1 if parameters <= LIVE else 2 * micro_batches
    return Messages(0.0, micro_batches * gradients, passes * weights)


@dataclass(frozen=True)
class Machine:
    """Describe what a roofline is made of."""

    devices: int
    flops: float
    """Floating-point operations of one device in a second, as far as training reaches them."""
    bandwidth: float
    """Bytes that one device sends in a second, and receives meanwhile, over the slowest link between two."""


@dataclass(frozen=True)
class StepTime:
    """Hold what a step of the full batch takes under a ZeRO stage."""

    sent_bytes: float
    """By each rank."""
    compute_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        """Return the time if nothing of the network is hidden behind the computation."""
        return self.compute_seconds + self.network_seconds


def step_time(config: Config, parameters: int, stage: int, recomputed: Recomputed, machine: Machine) -> StepTime:
    """Return what a step takes: its arithmetic, that which is done again included, and its messages.

    Args:
        config: the run.
        parameters: that are trained.
        stage: of ZeRO.
        recomputed: what the backward pass computes again; a forward pass is a third of a step. What `selective`
            computes again is no matrix product, and not counted.
        machine: that the step is made on.
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
    """Hold work and time of a run; of a branch, without its parent."""

    steps: int
    tokens: int
    flops: float
    """Of training; without what is computed a second time."""
    hours: float
    """Of arithmetic, with what is computed a second time."""
    network_hours: float
    """That messages add, where nothing hides them."""


def compute(config: Config, plan: RunPlan, step: StepTime) -> Compute:
    """Return the FLOPs of a run, and its hours where a step takes `step`."""
    steps = plan.total_steps - plan.first_step
    tokens = plan.total_tokens - plan.batch_plan.tokens_before(plan.first_step)
    flops = tokens * training_flops_per_token(config.model, config.data.sequence_length, config.objective)
    hours = tokens / config.data.batch_plan.tokens_per_step * step.compute_seconds / 3600
    return Compute(steps, tokens, flops, hours, network_hours=steps * step.network_seconds / 3600)
