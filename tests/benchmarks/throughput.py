"""Compare training tokens/s of the engine with a plain PyTorch loop's: same model, same batches, same process count.

    python tests/benchmarks/throughput.py [--layers 6 --width 384 --length 256 --batch 8 --steps 12 --rounds 3]

Rounds of the two loops alternate, so that drift of the machine strikes both alike; the medians are compared. It prints
one JSON object. Use one process and all cores (the default) or `torchrun --nproc-per-node N`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.parse import parse_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.system import startup
from plumbline.launcher.runtime.system.world import World, read_world
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table

VOCABULARY = 8192


def make_config(arguments: argparse.Namespace, corpus: Path, precision: str, zero_stage: int, world: World) -> Config:
    """Return the configuration of one measurement."""
    values = {
        "run": {"name": "throughput"},
        "model": {
            "family": arguments.family,
            "vocab_size": VOCABULARY,
            "hidden_size": arguments.width,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": arguments.width // 64,
            "max_position_embeddings": arguments.length,
        },
        "parameterization": {"rule": "sp"},
        "data": {
            "train": [{"path": str(corpus)}],
            "sequence_length": arguments.length,
            "global_batch_size": arguments.batch * world.size,
            "micro_batch_size": arguments.batch,
        },
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 1000},
        "deepspeed": {"precision": precision, "zero_stage": zero_stage},
    }
    return parse_config(values, "benchmark")


def plain_loop(config: Config, world: World, precision: str) -> Callable[[dict[str, Any]], None]:
    """Run the loop a PyTorch user would write: fp32 weights, autocast for bf16, full logits, AdamW, clipping, DDP."""
    rule = config.parameterization
    model: Any = CausalLM(config.model, multipliers(config.model, rule))
    initialize(model, parameter_table(config.model, rule, OptimizerSettings(1e-3, 0.1, 1e-8)), 1)
    model.to(world.device)
    if world.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(batch: dict[str, Any]) -> None:
        batch = {name: tensor.to(world.device) for name, tensor in batch.items()}
        autocast = torch.autocast(world.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
        with autocast:
            logits = model(batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def measure(
    arguments: argparse.Namespace, corpus: Path, precision: str, zero_stage: int, world: World
) -> dict[str, Any]:
    """Median seconds per step of both loops, in alternating rounds."""
    config = make_config(arguments, corpus, precision, zero_stage, world)
    batches = TrainBatches(config.data, 1, world.rank, world.size)
    engine, plain = DeepSpeedEngine(config, world), plain_loop(config, world, precision)
    ours: list[float] = []
    theirs: list[float] = []
    number = 0
    for round_number in range(arguments.rounds + 1):  # the first round warms up
        for times, run in (
            (ours, lambda b, n: engine.train_step([b], n, 1e-3).result.loss.item()),
            (theirs, lambda b, _: plain(b)),
        ):
            for _ in range(arguments.steps):
                (batch,) = batches.micro_batches(number)
                dist.barrier()
                start = time.perf_counter()
                run(batch, number)
                if round_number:
                    times.append(time.perf_counter() - start)
                number += 1
    tokens = arguments.batch * arguments.length * world.size
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "precision": precision,
        "zero_stage": zero_stage,
        "tokens_per_second": round(tokens / mine),
        "plain_tokens_per_second": round(tokens / other),
        "ratio": round(other / mine, 3),
    }


def main() -> None:
    """Measure fp32 and bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 384), ("length", 256), ("batch", 8), ("steps", 12), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", default="qwen3", choices=("qwen3", "gpt2"))
    arguments = parser.parse_args()
    world = read_world()
    startup.start(world, timeout_minutes=10)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / f"random{world.rank}"
        with IndexedWriter(corpus, token_dtype(VOCABULARY)) as writer:
            tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2_000_000, dtype=np.uint16)
            writer.add_documents(tokens, [len(tokens)])
        for precision, stage in (("fp32", 0), ("fp32", 1), ("bf16", 1)):
            results.append(measure(arguments, corpus, precision, stage, world))
    if world.is_main:
        facts = {**vars(arguments), "ranks": world.size, "threads": torch.get_num_threads(), "cpus": os.cpu_count()}
        print(json.dumps({"setting": facts, "device": world.device.type, "results": results}, indent=2))
    startup.stop()


if __name__ == "__main__":
    main()
