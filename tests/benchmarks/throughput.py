"""Compare training tokens/s of the engine with a plain PyTorch loop's: same model, same batches, same process count.

    python tests/benchmarks/throughput.py [--layers 6 --width 384 --length 256 --batch 8 --steps 6 --rounds 6]
        [--accumulate 1] [--settings fp32:0,fp32:1,bf16:1] [--compile] [--alone] [--operators N] [section.key=value ...]

A setting is a precision and a ZeRO stage; what else is given goes into the engine's configuration. Rounds of the two
loops alternate, so that drift of the machine strikes both alike; each is timed as a whole, and the medians are
compared, with the quartiles of the ratio of neighbours beside them. A step has --accumulate micro-batches. With
--compile the plain loop compiles its model, and the engine its blocks. With --alone there is no plain loop, for a model
of which a device holds no second one; one that it does not hold at all, by the estimate of plan.py, is not tried. `mfu`
is of the device's peak, named or measured. `of_product` counts half the square of attention, which is what a causal
kernel computes, and compares with a large matrix product, made when the last round has warmed the device up: where
power or heat limits it, no step comes close to the named peak. With --operators each loop's longest operators are told
as well, in ms of a step, from one more round under torch's profiler, which takes time of its own. It prints one JSON
object. Use one process and all cores (the default) or `torchrun --nproc-per-node N`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.data.windows import Batch
from plumbline.launcher.runtime.config.budget import GIB
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.stage import assumed_machine, estimate_stages, fastest
from plumbline.launcher.runtime.engine.step_result import StepUnderWay
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.memory import device_bytes
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.train.speed import peak_flops
from plumbline.model.decoder import CausalLM
from plumbline.model.flops import training_flops_per_token
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table
from tests.benchmarks.step_cost import write_random_text
from tests.benchmarks.turns import take_turns

SIZES = {"layers": 6, "width": 384, "length": 256, "batch": 8, "vocabulary": 8192, "steps": 6, "rounds": 6}
Loop = Callable[[Sequence[Batch], int], Callable[[], object]]
"""Make a step of micro-batches and its number, for which nobody has waited; what is returned waits for it."""


def make_config(arguments: argparse.Namespace, corpus: Path, setting: str, world: World) -> Config:
    """Return the configuration of one measurement."""
    precision, _, zero_stage = setting.partition(":")
    values = {
        "run": {"name": "throughput"},
        "model": {
            "family": arguments.family,
            "vocab_size": arguments.vocabulary,
            "hidden_size": arguments.width,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": arguments.width // 64,
            "max_position_embeddings": arguments.length,
        },
        "parameterization": {"rule": "sp"},
        "data": {
            "train": [{"path": str(corpus)}],
            "sequence_length": arguments.length,
            "global_batch_size": arguments.batch * arguments.accumulate * world.size,
            "micro_batch_size": arguments.batch,
        },
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 1000, "compile": arguments.compile},
        "deepspeed": {"precision": precision, "zero_stage": int(zero_stage)},
    }
    written = corpus.with_suffix(".yaml")
    written.write_text(json.dumps(values))  # JSON is YAML
    return load_config(written, arguments.overrides)


def engine_loop(config: Config, world: World) -> Loop:
    """Return a step of the engine."""
    engine = DeepSpeedEngine(config, world)
    under_way: list[StepUnderWay] = []

    def step(batches: Sequence[Batch], number: int) -> Callable[[], object]:
        under_way.append(engine.train_step(batches, number, 1e-3))
        if len(under_way) > 1:
            _ = under_way.pop(0).result  # as training reads a step: once the next is given to the device
        return lambda: under_way.pop().result

    return step


def plain_loop(config: Config, world: World, compiled: bool) -> Loop:
    """Return the step a PyTorch user writes: fp32 weights, autocast for bf16, full logits, AdamW, clipping, DDP."""
    rule = config.parameterization
    model: Any = CausalLM(config.model, multipliers(config.model, rule))
    initialize(model, parameter_table(config.model, rule, OptimizerSettings(1e-3, 0.1, 1e-8)), 1)
    model.to(world.device)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    if world.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if compiled:
        model = torch.compile(model)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    bf16 = config.deepspeed.precision == "bf16"

    def add_gradient(batch: Batch, share: float) -> Tensor:
        inputs = batch["input_ids"].to(world.device, non_blocking=True)
        labels = batch["labels"].to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, torch.bfloat16) if bf16 else nullcontext():
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * share
        loss.backward()
        return loss.detach()

    def step(batches: Sequence[Batch], _: int) -> Callable[[], object]:
        with model.no_sync() if world.size > 1 else nullcontext():  # gradients are summed over ranks once a step
            for batch in batches[:-1]:
                add_gradient(batch, 1 / len(batches))
        loss = add_gradient(batches[-1], 1 / len(batches))
        clip_grad_norm_(decay + rest, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item

    return step


def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product of random numbers, as warm as the device is by now."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = take_turns({"product": lambda: left @ right}, rounds=20, device=device)
    return 2 * size**3 / seconds["product"]


def longest_operators(
    make_round: Callable[[], object], steps: int, most: int, device: torch.device
) -> dict[str, float]:
    """Return the operators that take longest by themselves on a device, in ms of a step."""
    own = f"self_{device.type.replace('cuda', 'device')}_time_total"  # in microseconds
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as seen:
        make_round()
    # Kernels count for who calls them; a part of a step is no operator
    called = (row for row in seen.key_averages() if row.device_type == DeviceType.CPU and "step: " not in row.key)
    rows = sorted(called, key=lambda row: -getattr(row, own))
    return {row.key: round(getattr(row, own) / steps / 1000, 2) for row in rows[:most]}


def measure(arguments: argparse.Namespace, corpus: Path, setting: str, world: World) -> dict[str, Any]:
    """Time both loops in alternating rounds."""
    config = make_config(arguments, corpus, setting, world)
    if arguments.alone:
        room, stage, machine = device_bytes(world), config.deepspeed.zero_stage, assumed_machine(config, world.size)
        estimates = estimate_stages(config, plan_run(config).rows, [stage], machine, room, world.device)
        if fastest(estimates, room) is None:
            return {"setting": setting, "tokens_per_second": f"needs {estimates[stage].memory.total / GIB:.0f} GiB"}
    batches = TrainBatches(config.data, 1, world.rank, world.size, gpu=world.device.index)
    loops = [engine_loop(config, world)]
    if not arguments.alone:
        loops.append(plain_loop(config, world, arguments.compile))
    seconds: list[list[float]] = [[] for _ in loops]
    numbers = count()

    def make_round(loop: Loop) -> float:
        given = [(batches.micro_batches(number), number) for number in islice(numbers, arguments.steps)]
        dist.barrier()
        start = time.perf_counter()
        for micro_batches, number in given:
            wait = loop(micro_batches, number)
        wait()
        taken: float = (time.perf_counter() - start) / arguments.steps
        return taken

    for round_number in range(arguments.rounds + 1):  # the first round warms up
        for times, loop in zip(seconds, loops, strict=True):
            taken = make_round(loop)
            if round_number:
                times.append(taken)
    ours, *theirs = map(statistics.median, seconds)
    tokens = arguments.batch * arguments.accumulate * arguments.length * world.size
    dtype = torch.bfloat16 if config.deepspeed.precision == "bf16" else torch.float32
    product = product_flops(world.device, dtype)
    square = training_flops_per_token(config.model, arguments.length, config.objective)
    # The count is linear in the length, and a token of a causal kernel sees half of it in the mean
    causal = training_flops_per_token(config.model, arguments.length // 2, config.objective)
    own = tokens / ours / world.size
    found = {
        "setting": setting,
        "tokens_per_second": round(tokens / ours),
        "mfu": round(own * square / peak_flops(world, dtype, None), 3),
        "of_product": round(own * causal / product, 3),
        "product_tflops": round(product / 1e12, 3),
    }
    if arguments.operators:
        found["operators_ms"] = [
            longest_operators(partial(make_round, loop), arguments.steps, arguments.operators, world.device)
            for loop in loops
        ]
    if not theirs:
        return found
    low, _, high = statistics.quantiles(other / own for own, other in zip(*seconds, strict=True))
    return {
        **found,
        "plain_tokens_per_second": round(tokens / theirs[0]),
        "ratio": round(theirs[0] / ours, 3),
        "quartiles_of_the_ratio": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    """Measure each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", default="qwen3", choices=("qwen3", "gpt2"))
    parser.add_argument("--settings", default="fp32:0,fp32:1,bf16:1", metavar="PRECISION:STAGE,...")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches of a step")
    parser.add_argument("--compile", action="store_true", help="compile both")
    parser.add_argument("--alone", action="store_true", help="no plain loop")
    parser.add_argument("--operators", type=int, default=0, metavar="N", help="tell the N longest of each loop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    world = read_world()
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / f"random{world.rank}"
        write_random_text(corpus, arguments.vocabulary, tokens=10_000_000)
        results = [measure(arguments, corpus, setting, world) for setting in arguments.settings.split(",")]
    if world.is_main:
        facts = {**vars(arguments), "ranks": world.size, "threads": torch.get_num_threads(), "cpus": os.cpu_count()}
        device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
        print(json.dumps({"setting": facts, "device": device, "results": results}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
