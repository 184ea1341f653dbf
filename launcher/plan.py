# PYTHON_ARGCOMPLETE_OK
"""Show the cost of a configuration before it runs: parameters, FLOPs, memory and time per ZeRO stage.

python launcher/plan.py --config configs/quickstart.yaml
python launcher/plan.py --config configs/quickstart.yaml --parameters                 # the parameterization's table
python launcher/plan.py --config configs/ladder/7b.yaml --devices 64 --peak-tflops 989 --json
python launcher/plan.py --config configs/ladder/7b.yaml --law laws/mine/law.json      # also the loss, by a scaling law
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.system import assumed_device


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--config", type=cli.existing, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    parser.add_argument(
        "--parameters", action="store_true", help="print one row for each tensor, with equal layers combined"
    )
    parser.add_argument("--devices", type=cli.positive, default=1, help="GPUs (or CPU processes) to plan for")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="peak of one device (default: metrics.peak_tflops, or an H100's: 989 in bf16, 67 in fp32)",
    )
    parser.add_argument(
        "--device-gib",
        type=float,
        default=80.0,
        help="memory of one device, in GiB (default: 80, an H100; an H200 has 141)",
    )
    parser.add_argument(
        "--mfu", type=float, default=assumed_device.MFU, help="assumed model FLOPs utilisation, without communication"
    )
    parser.add_argument(
        "--network-gbs",
        type=float,
        default=assumed_device.NETWORK_GBS,
        help="GB/s that a device sends over its slowest link (default: 50, a port of 400 Gb/s for each)",
    )
    parser.add_argument("--price", type=float, help="price of one device for one hour: also print the cost of the run")
    parser.add_argument(
        "--law", metavar="LAW", help="law.json of launcher/fit.py, or a published law such as kumar2411"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


import torch

from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.config.budget import GIB, MIB, ParameterCount, totals
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import RunPlan, plan_parameters, plan_run
from plumbline.launcher.runtime.config.rank_counts import check_ranks
from plumbline.launcher.runtime.config.remarks import cautions, describe_settings
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.network import Compute, Machine, compute
from plumbline.launcher.runtime.engine.stage import (
    StageEstimate,
    estimate_stages,
    fastest,
    peak_tflops,
    preferred,
    shortage,
)
from plumbline.launcher.runtime.laws import prediction
from plumbline.launcher.runtime.optim.proportions import Proportions
from plumbline.model.flops import training_flops_per_token
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.multipliers import Multipliers, multipliers
from plumbline.model.parameterization.rows import ParameterRow, over_layers
from plumbline.model.parameterization.sizes import Sizes, sizes

GPU = torch.device("cuda")
"""The kind of device that the plan is for."""


@dataclass(frozen=True)
class PlanFacts:
    """Hold every number of a plan."""

    parameter_count: ParameterCount
    precision: dict[str, Any]
    """The `precision` section of the configuration."""
    optimizer: OptimizerSettings
    sizes: Sizes
    multipliers: Multipliers
    parameters: tuple[ParameterRow, ...]
    flops_per_token: float
    stages: dict[int, StageEstimate]
    """Memory and time of each ZeRO stage that the optimizer supports."""
    batch: str
    micro_batch: int
    accumulation_steps: int
    schedule: str
    proportions: Proportions
    cautions: tuple[str, ...]
    """Warnings about values that are allowed."""
    compute: Compute
    fastest: int | None
    """ZeRO stage with the shortest step among those that fit a device, or None if none does."""
    law: prediction.Prediction | None
    """None without --law."""

    def to_json(self) -> dict[str, Any]:
        """Return the document of --json."""
        values = asdict(self)
        del values["law"], values["stages"]
        stages = self.stages.items()
        values["recomputed"] = {stage: each.recomputed for stage, each in stages}
        values["memory_bytes"] = {stage: {**asdict(each.memory), "total": each.memory.total} for stage, each in stages}
        values["steps"] = {stage: {**asdict(each.step), "seconds": each.step.seconds} for stage, each in stages}
        return values if self.law is None else {**values, "law": self.law.to_json()}


def main() -> None:
    """Compute the plan and print it."""
    arguments = parse_arguments()
    check_options(arguments)
    estimates = Estimates(arguments)
    config = branch.resolve(load_config(arguments.config, arguments.overrides, estimates.choose))
    plan = plan_run(config)
    if arguments.parameters and not arguments.json:
        print_parameters(config, plan)  # without the estimate of memory, which takes seconds
        return
    check_ranks(config, arguments.devices)
    facts = collect_facts(config, plan, estimates.of(config, plan.rows), arguments)
    if arguments.json:
        cli.print_json(facts.to_json())
    else:
        print_plan(config, plan, facts, arguments)


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option whose value no machine can have, or that would have no effect."""
    for name in ("devices", "peak_tflops", "mfu", "device_gib", "network_gbs", "price"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: must be a number above 0")
    if arguments.mfu > 1:
        raise ValueError(f"--mfu {arguments.mfu:g}: is a share, at most 1: 0.5 for 50 %")
    given = [f"--{name}" for name in ("law", "price") if getattr(arguments, name) is not None]
    if arguments.parameters and given and not arguments.json:
        raise ValueError(f"--parameters prints its table alone: leave out {' and '.join(given)}, or add --json")


def peak_of(config: Config, arguments: argparse.Namespace) -> float:
    """Return the peak of a device in TFLOP/s: of the option, or as without one."""
    return float(arguments.peak_tflops or peak_tflops(config))


def machine_of(config: Config, arguments: argparse.Namespace) -> Machine:
    """Return the machine of the roofline."""
    flops = peak_of(config, arguments) * 1e12 * arguments.mfu
    return Machine(arguments.devices, flops, arguments.network_gbs * 1e9)


class Estimates:
    """Estimate each ZeRO stage on the machine of the options, once for the choice of the stage and for the plan.

    Args:
        arguments: the options.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._device_bytes = arguments, arguments.device_gib * GIB
        self._found: dict[int, StageEstimate] | None = None

    def of(self, config: Config, rows: Sequence[ParameterRow]) -> dict[int, StageEstimate]:
        """Return the estimate of each ZeRO stage that could train the run, whichever stage the configuration names."""
        if self._found is None:  # it takes seconds
            machine = machine_of(config, self._arguments)
            self._found = estimate_stages(config, rows, config.zero_stages, machine, self._device_bytes, GPU)
        return self._found

    def choose(self, candidates: Mapping[int, Config]) -> int:
        """Return the ZeRO stage that would be chosen for a run whose configuration leaves it open."""
        config = next(iter(candidates.values()))
        _, rows = plan_parameters(config)
        estimates = self.of(config, rows)
        return preferred({stage: estimates[stage] for stage in candidates}, self._device_bytes)


def collect_facts(
    config: Config, plan: RunPlan, estimates: dict[int, StageEstimate], arguments: argparse.Namespace
) -> PlanFacts:
    """Return every number of the plan.

    Args:
        config: the run.
        plan: plan of this configuration.
        estimates: estimate of each ZeRO stage that the optimizer supports.
        arguments: the options.

    Raises:
        ValueError: the law cannot be used.
    """
    count, law, room = totals(plan.rows), None, arguments.device_gib * GIB
    too_large = shortage(estimates, config.deepspeed.zero_stage, room)
    if arguments.law is not None:
        size = (count.total, count.non_embedding, plan.total_tokens)
        law = prediction.predict(arguments.law, *size, config.model.vocab_size, config.precision)
    return PlanFacts(
        parameter_count=count,
        precision=config.precision.model_dump(),
        optimizer=plan.settings,
        sizes=sizes(config.model, config.parameterization),
        multipliers=multipliers(config.model, config.parameterization),
        parameters=tuple(plan.rows),
        flops_per_token=training_flops_per_token(config.model, config.data.sequence_length, config.objective),
        stages=estimates,
        batch=plan.batch_plan.describe(),
        micro_batch=config.data.micro_batch(arguments.devices),
        accumulation_steps=config.data.accumulation_steps(arguments.devices),
        schedule=plan.schedule.describe(),
        proportions=plan.proportions,
        cautions=(*cautions(config, plan), *([too_large] if too_large else [])),
        compute=compute(config, plan, estimates[config.deepspeed.zero_stage].step),
        fastest=fastest(estimates, room),
        law=law,
    )


def print_parameters(config: Config, plan: RunPlan) -> None:
    """Print the table of the parameterization with peak values, then the forward multipliers."""
    rows = list(over_layers(plan.rows))
    width = max(len(row.name) for row in rows)
    header = f"{'role':<13}  {'shape':>14}  {'init std':>9}  {'lr':>9}  {'lr x':>7}  {'wd':>7}  {'eps':>8}"
    print(f"{'name':<{width}}  {header}")
    for row in rows:
        shape = "x".join(str(size) for size in row.shape)
        lr = f"{row.lr:.3g}" if row.trainable else "frozen"
        drawn = f"{row.init_std:.3g}" if row.init_std else "-"  # the others begin at a constant
        print(
            f"{row.name:<{width}}  {row.role:<13}  {shape:>14}  {drawn:>9}  {lr:>9}  "
            f"{row.lr_multiplier:>7.4g}  {row.weight_decay:>7.3g}  {row.eps:>8.2g}"
        )
    forward = asdict(multipliers(config.model, config.parameterization)).items()
    print("\nforward multipliers: " + ", ".join(f"{name} {value:.6g}" for name, value in forward))


def print_plan(config: Config, plan: RunPlan, facts: PlanFacts, arguments: argparse.Namespace) -> None:
    """Print the plan in one screen."""
    model, count, size, work = config.model, facts.parameter_count, facts.sizes, facts.compute
    print(
        f"model       {model.family}, width {model.hidden_size}, depth {model.num_hidden_layers}, "
        f"vocabulary {model.vocab_size}"
    )
    print(f"parameters  {count.total:,} ({count.non_embedding:,} without embedding and head)")
    print(f"scaling     {config.parameterization.rule}: m_N {size.width:g}, m_L {size.depth:g}, alpha {size.alpha:g}")
    if not config.precision.is_plain:
        print(f"precision   {config.precision}")
    for caution in facts.cautions:
        print(f"warning     {caution}")
    if not config.objective.is_plain:
        print(f"objective   {config.objective}")
    print(f"optimizer   {describe_settings(config, plan)}")
    print(f"data        {work.tokens:,} tokens in {work.steps:,} steps")
    ratio = facts.proportions.tokens / count.non_embedding
    print(f"length      {facts.proportions} ({ratio:.3g} without embedding and head)")
    print(
        f"batch       {facts.batch} of {config.data.sequence_length:,} tokens, on {arguments.devices} device(s) "
        f"{facts.micro_batch} each in {facts.accumulation_steps} accumulation steps"
    )
    print(f"schedule    {facts.schedule}")
    print(f"compute     {work.flops:.3g} FLOPs ({facts.flops_per_token:.3g} per token)")
    print_time(config, facts, arguments)
    print_stages(config, facts, arguments)
    if facts.law is not None:
        print()
        for line in prediction.lines(facts.law):
            print(line)


def print_time(config: Config, facts: PlanFacts, arguments: argparse.Namespace) -> None:
    """Print the time of the run by the roofline model, and its cost."""
    work = facts.compute
    print(
        f"time        {lasting(work.hours)} on {arguments.devices} device(s) of {peak_of(config, arguments):g} TFLOP/s "
        f"at {arguments.mfu:.0%} of the peak, {work.tokens / work.hours / 3600:,.0f} tokens/s; messages at "
        f"{arguments.network_gbs:g} GB/s add {lasting(work.network_hours)} at most, where nothing hides them"
    )
    if arguments.price is not None:
        hourly = arguments.price * arguments.devices
        least, most = hourly * work.hours, hourly * (work.hours + work.network_hours)
        print(f"cost        {short(least)} to {short(most)} at {arguments.price:g} for an hour of a device")


def lasting(hours: float) -> str:
    """Return a time in hours, or in seconds if it is short."""
    return f"{hours:,.2f} hours" if hours >= 0.1 else f"{short(3600 * hours)} seconds"


def short(value: float) -> str:
    """Return a number with two decimals, or with three significant digits if it is below 1."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def print_stages(config: Config, facts: PlanFacts, arguments: argparse.Namespace) -> None:
    """Print memory and time of each ZeRO stage."""
    largest = max(estimate.memory.total for estimate in facts.stages.values())
    unit, size_of_unit = ("GiB", GIB) if largest >= 0.1 * GIB else ("MiB", MIB)
    of_one = f"memory of one of {arguments.devices} device(s) with {arguments.device_gib:g} GiB"
    print(f"\n{of_one}, in {unit} (an estimate)")
    columns = ["weights", "gradients", "optimizer", "buffers", "activations", "update", "total"]
    if config.deepspeed.offload_optimizer:
        columns.append("host")
    names = [*columns, "sent/step", "seconds"]
    print(f"{'':<6} {' '.join(f'{name:>11}' for name in names)}  checkpointing")
    for stage, estimate in facts.stages.items():
        memory, step = estimate.memory, estimate.step
        sizes = [*(getattr(memory, column) for column in columns), step.sent_bytes]
        notes = ["fastest that fits"] if stage == facts.fastest else []
        notes += ["this configuration"] if stage == config.deepspeed.zero_stage else []
        here = f"  <- {', '.join(notes)}" if notes else ""
        shown = [*(f"{size / size_of_unit:>11.2f}" for size in sizes), f"{short(step.seconds):>11}"]
        print(f"ZeRO-{stage} {' '.join(shown)}  {estimate.recomputed}{here}")


if __name__ == "__main__":
    cli.run(main)
