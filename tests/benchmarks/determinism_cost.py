"""Measure what the same bits cost: seconds of a step as it is, with run.deterministic, and with run.reproducible.

    python tests/benchmarks/determinism_cost.py [--config configs/quickstart.yaml --rounds 30 section.key=value ...]
    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/determinism_cost.py data.micro_batch_size=8

Steps of all kinds alternate, so that drift of the machine strikes them alike; medians are compared, with the quartiles
of the ratio of neighbours beside them. The text is random. It prints one JSON object. Without a GPU it shows what
torch's deterministic kernels cost on the CPU alone. A rank of run.reproducible has one thread there, as all do here.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.any_ranks import AnyRanksEngine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.interface import Engine
from plumbline.launcher.runtime.system import determinism, startup
from plumbline.launcher.runtime.system.world import World, read_world

VOCABULARY = 4096


def measure(config: Config, world: World, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each kind, "plain" first."""
    batches, ordinary = TrainBatches(config.data, 1, world.rank, world.size), DeepSpeedEngine(config, world)
    kinds: dict[str, tuple[Engine, bool]] = {"plain": (ordinary, False), "deterministic": (ordinary, True)}
    if config.deepspeed.zero_stage < 3 and not config.deepspeed.offload_optimizer:
        kinds["any_ranks"] = AnyRanksEngine(config, world), True
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 2):  # the first two of each kind warm up
        for kind, (engine, repeatable) in kinds.items():
            micro_batches = batches.micro_batches(number)
            determinism.enforce(repeatable, world.device)
            start = time.perf_counter()
            engine.train_step(micro_batches, number, 1e-3).result.loss.item()
            if number >= 2:
                seconds[kind].append(time.perf_counter() - start)
    return seconds


def compared(seconds: list[float], plain: list[float]) -> dict[str, object]:
    """Return the median of some steps, its ratio to that of plain ones, and quartiles of the ratio of neighbours."""
    low, _, high = statistics.quantiles([found / before for found, before in zip(seconds, plain, strict=True)])
    ratio = statistics.median(seconds) / statistics.median(plain)
    return {"seconds": statistics.median(seconds), "ratio": ratio, "quartiles_of_the_ratio": [low, high]}


def main() -> None:
    """Measure one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    world = read_world()
    determinism.enforce(True, world.device)  # ahead of the first use of a GPU
    startup.start(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "random"
        with IndexedWriter(corpus, token_dtype(VOCABULARY)) as writer:
            tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2_000_000, dtype=np.uint16)
            writer.add_documents(tokens, [len(tokens)])
        fixed = [f"data.train=[{{path: {corpus}}}]", f"model.vocab_size={VOCABULARY}"]
        seconds = measure(load_config(arguments.config, [*fixed, *arguments.overrides]), world, arguments.rounds)
    if world.is_main:
        facts = {
            "config": str(arguments.config),
            "overrides": arguments.overrides,
            "ranks": world.size,
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "device": world.device.type,
        }
        ways = {kind: compared(found, seconds["plain"]) for kind, found in seconds.items()}
        print(json.dumps({**facts, "ways": ways}, indent=2))
    startup.stop()


if __name__ == "__main__":
    main()
