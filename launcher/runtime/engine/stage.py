"""Choose the ZeRO stage of a run (`deepspeed.zero_stage: auto`): 1 if it fits a device, else the faster of 2 and 3.

Memory is an estimate (memory.py), the step a roofline of arithmetic and messages (network.py); `plan.py` prints both
for every stage. Stage 1 sends the fewest and largest messages. Stage 3 may look faster by bytes alone, but the roofline
counts neither latency nor host work for the messages that each block waits for there.
Each start looks at its devices, so a run that is resumed elsewhere may have another stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from plumbline.launcher.runtime.config.budget import GIB, totals
from plumbline.launcher.runtime.config.plan import plan_parameters
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.build import compiles
from plumbline.launcher.runtime.engine.memory import USABLE, DeviceMemory, Estimate
from plumbline.launcher.runtime.engine.network import Machine, StepTime, step_time
from plumbline.launcher.runtime.ranks.memory import device_bytes
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system import assumed_device
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.recomputation import Recomputed


@dataclass(frozen=True)
class StageEstimate:
    """Hold the estimates for one ZeRO stage."""

    recomputed: Recomputed
    """What the backward pass recomputes (train.activation_checkpointing)."""
    memory: DeviceMemory
    step: StepTime


def estimate_stages(
    config: Config,
    rows: Sequence[ParameterRow],
    stages: Iterable[int],
    machine: Machine,
    device_bytes: float,
    device: torch.device,
) -> dict[int, StageEstimate]:
    """Return the estimates for ZeRO stages, whichever stage the configuration has.

    Args:
        config: the run.
        rows: its parameterization table.
        stages: ZeRO stages.
        machine: the machine of the roofline.
        device_bytes: memory of one device.
        device: a device of that kind.
    """
    count = totals(rows)
    estimate, found = Estimate(config, count, machine.devices, on_gpu=device.type == "cuda"), {}
    for stage in stages:
        recomputed = estimate.recomputed(stage, device_bytes, compiles(at_stage(config, stage), device))
        step = step_time(config, count.trained, stage, recomputed, machine)
        found[stage] = StageEstimate(recomputed, estimate.memory(stage, recomputed), step)
    return found


def assumed_machine(config: Config, ranks: int) -> Machine:
    """Return the machine that is assumed where none is given, to weigh recomputation against communication."""
    return Machine(ranks, 1e12 * peak_tflops(config) * assumed_device.MFU, 1e9 * assumed_device.NETWORK_GBS)


def peak_tflops(config: Config) -> float:
    """Return the peak of a device in TFLOP/s, as the configuration says or as assumed for its precision."""
    return config.metrics.peak_tflops or assumed_device.PEAK_TFLOPS[config.deepspeed.precision]


def at_stage(config: Config, stage: int) -> Config:
    """Return the configuration with another ZeRO stage."""
    return config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage})})


def fitting(estimates: Mapping[int, StageEstimate], device_bytes: float) -> list[int]:
    """Return the ZeRO stages that fit a device, with room for the allocator and libraries."""
    return [stage for stage, each in estimates.items() if each.memory.total <= USABLE * device_bytes]


def fastest(estimates: Mapping[int, StageEstimate], device_bytes: float) -> int | None:
    """Return the ZeRO stage with the shortest step among those that fit (on ties the lowest), or None if none fits."""
    return min(fitting(estimates, device_bytes), key=lambda stage: estimates[stage].step.seconds, default=None)


def preferred(estimates: Mapping[int, StageEstimate], device_bytes: float) -> int:
    """Return what `auto` becomes: the lowest stage if it fits, else the fastest that fits, else the last."""
    least = min(estimates)
    if least in fitting(estimates, device_bytes):
        return least
    quickest = fastest(estimates, device_bytes)
    return max(estimates) if quickest is None else quickest


def shortage(estimates: Mapping[int, StageEstimate], stage: int, device_bytes: float) -> str | None:
    """Return that a run at a ZeRO stage does not fit a device and which stages do, or None if it fits."""
    fit = fitting(estimates, device_bytes)
    if stage in fit:
        return None
    if fit:
        instead = f"ZeRO stage {' or '.join(map(str, fit))} does"
    else:
        instead = "no ZeRO stage does: lower data.micro_batch_size, or set train.activation_checkpointing=auto"
    return (
        f"by the estimate this run does not fit a device of {device_bytes / GIB:g} GiB, of which it may take "
        f"{USABLE:.0%}, since the allocator and libraries need the rest; {instead}"
    )


def choose_stage(candidates: Mapping[int, Config], world: World, told: bool) -> int:
    """Return the ZeRO stage of a run on the devices of a world.

    Args:
        candidates: stage -> the configuration with it, for all stages that the configuration permits.
        world: this process among all; the process group need not be up.
        told: whether this rank logs the choice, and warns if no stage fits.
    """
    room = device_bytes(world)
    config = next(iter(candidates.values()))
    machine = assumed_machine(config, world.size)
    _, rows = plan_parameters(config)
    estimates = estimate_stages(config, rows, candidates, machine, room, world.device)
    chosen = preferred(estimates, room)
    if told:
        sizes = ", ".join(f"{each.memory.total / GIB:.2f} at stage {stage}" for stage, each in estimates.items())
        TRAINING.info(
            f"stage    {chosen}, of deepspeed.zero_stage = auto: an estimate in GiB is {sizes}, and a device has "
            f"{room / GIB:.1f}"
        )
        if fastest(estimates, room) is None:
            LOG.warning("no ZeRO stage fits by the estimate; plan.py says what takes the memory")
    return chosen
