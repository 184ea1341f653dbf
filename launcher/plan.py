# PYTHON_ARGCOMPLETE_OK
"""Say what a configuration means before it costs anything: parameters, memory per ZeRO stage, FLOPs and time.

python launcher/plan.py --config configs/quickstart.yaml
python launcher/plan.py --config configs/quickstart.yaml --parameters                 # the parameterization's table
python launcher/plan.py --config configs/ladder/7b.yaml --devices 64 --peak-tflops 989 --json
python launcher/plan.py --config configs/ladder/7b.yaml --law laws/mine/law.json      # also the loss, by a scaling law
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.launcher.runtime.system import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=cli.existing, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    parser.add_argument("--parameters", action="store_true", help="one row for each tensor, equal layers together")
    parser.add_argument("--devices", type=cli.positive, default=1, help="GPUs (or CPU processes) to plan for")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="peak of one device (default: H100, bf16)")
    parser.add_argument(
        "--device-gib", type=float, default=80.0, help="memory of one device, in GiB (default: H100; an H200 has 141)"
    )
    parser.add_argument("--mfu", type=float, default=0.4, help="assumed model FLOPs utilisation")
    parser.add_argument(
        "--law", metavar="LAW", help="law.json of launcher/fit.py, or a published law such as kumar2411"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


import torch

from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.config.budget import (
    GIB,
    Compute,
    ParameterCount,
    compute,
    totals,
)
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import RunPlan, cautions, describe_settings, plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.build import compiles
from plumbline.launcher.runtime.engine.memory import DeviceMemory, Estimate
from plumbline.launcher.runtime.laws import prediction
from plumbline.launcher.runtime.optim.proportions import Proportions
from plumbline.model.flops import training_flops_per_token
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.multipliers import Multipliers, multipliers
from plumbline.model.parameterization.rows import ParameterRow, over_layers
from plumbline.model.parameterization.sizes import Sizes, sizes
from plumbline.model.recomputation import Recomputed


@dataclass(frozen=True)
class PlanFacts:
    """Hold every number of a plan."""

    parameter_count: ParameterCount
    precision: dict[str, Any]
    """The section of the configuration."""
    optimizer: OptimizerSettings
    sizes: Sizes
    multipliers: Multipliers
    parameters: tuple[ParameterRow, ...]
    flops_per_token: float
    memory_bytes: dict[int, DeviceMemory]
    """ZeRO stage -> memory of one device, of the stages that the optimizer serves."""
    recomputed: dict[int, Recomputed]
    """ZeRO stage -> what the backward pass computes again there (train.activation_checkpointing)."""
    batch: str
    micro_batch: int
    accumulation_steps: int
    schedule: str
    proportions: Proportions
    cautions: tuple[str, ...]
    """What is allowed and deserves a word of warning."""
    compute: Compute
    law: prediction.Prediction | None
    """None without --law."""

    def to_json(self) -> dict[str, Any]:
        """Return the document of --json."""
        values = asdict(self)
        for stage, memory in self.memory_bytes.items():
            values["memory_bytes"][stage]["total"] = memory.total
        del values["law"]
        return values if self.law is None else {**values, "law": self.law.to_json()}


def main() -> None:
    """Compute and print."""
    arguments = parse_arguments()
    config = branch.resolve(load_config(arguments.config, arguments.overrides))
    plan = plan_run(config)
    facts = collect_facts(config, plan, arguments)
    if arguments.json:
        cli.print_json(facts.to_json())
    elif arguments.parameters:
        print_parameters(facts)
    else:
        print_plan(config, plan, facts, arguments)


def collect_facts(config: Config, plan: RunPlan, arguments: argparse.Namespace) -> PlanFacts:
    """Return every number of the plan.

    Raises:
        ValueError: an option is not positive, or the law cannot be used.
    """
    for name in ("devices", "peak_tflops", "mfu", "device_gib"):
        if getattr(arguments, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be positive")
    count, stages = totals(plan.rows), config.optimizer.kind.zero_stages
    estimate, compiled = Estimate(config, count.total, arguments.devices), compiles(config, torch.device("cuda"))
    device_bytes = arguments.device_gib * GIB
    recomputed = {stage: estimate.recomputed(stage, device_bytes, compiled) for stage in stages}
    law = None
    if arguments.law is not None:
        bits = config.precision.training_bits
        law = prediction.predict(arguments.law, count.non_embedding, plan.total_tokens, bits)
    return PlanFacts(
        parameter_count=count,
        precision=config.precision.model_dump(),
        optimizer=plan.settings,
        sizes=sizes(config.model, config.parameterization),
        multipliers=multipliers(config.model, config.parameterization),
        parameters=tuple(plan.rows),
        flops_per_token=training_flops_per_token(config.model, config.data.sequence_length, config.objective),
        memory_bytes={stage: estimate.memory(stage, recomputed[stage]) for stage in stages},
        recomputed=recomputed,
        batch=plan.batches.describe(),
        micro_batch=config.data.micro_batch(arguments.devices),
        accumulation_steps=config.data.accumulation_steps(arguments.devices),
        schedule=plan.schedule.describe(),
        proportions=plan.proportions,
        cautions=tuple(cautions(config, plan)),
        compute=compute(config, plan, arguments.devices, arguments.peak_tflops, arguments.mfu),
        law=law,
    )


def print_parameters(facts: PlanFacts) -> None:
    """Print the table of the parameterization, peak values, then the forward multipliers."""
    rows = list(over_layers(facts.parameters))
    width = max(len(row.name) for row in rows)
    header = f"{'role':<13}  {'shape':>14}  {'init std':>9}  {'lr':>9}  {'lr x':>7}  {'wd':>7}  {'eps':>8}"
    print(f"{'name':<{width}}  {header}")
    for row in rows:
        shape = "x".join(str(size) for size in row.shape)
        lr = f"{row.lr:.3g}" if row.trainable else "frozen"
        print(
            f"{row.name:<{width}}  {row.role:<13}  {shape:>14}  {row.init_std:>9.3g}  {lr:>9}  "
            f"{row.lr_multiplier:>7.4g}  {row.weight_decay:>7.3g}  {row.eps:>8.2g}"
        )
    forward = asdict(facts.multipliers).items()
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
    print(
        f"time        {work.hours:.2f} hours on {arguments.devices} device(s) of {arguments.peak_tflops:g} TFLOP/s "
        f"at {arguments.mfu:.0%} of the peak"
    )
    print(f"\nmemory of one of {arguments.devices} device(s) with {arguments.device_gib:g} GiB, in GiB (an estimate)")
    columns = ["weights", "gradients", "optimizer", "buffers", "activations", "update", "total"]
    if config.deepspeed.offload_optimizer:
        columns.append("host")
    print(f"{'':<6} {' '.join(f'{column:>11}' for column in columns)}  checkpointing")
    for stage, memory in facts.memory_bytes.items():
        cells = (f"{getattr(memory, column) / GIB:>11.2f}" for column in columns)
        here = "  <- this configuration" if stage == config.deepspeed.zero_stage else ""
        print(f"ZeRO-{stage} {' '.join(cells)}  {facts.recomputed[stage]}{here}")
    if facts.law is not None:
        print()
        for line in prediction.lines(facts.law):
            print(line)


if __name__ == "__main__":
    cli.run(main)
