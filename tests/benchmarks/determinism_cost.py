"""Measure what run.deterministic costs: seconds of a step with and without it, in one process on one engine.

    python tests/benchmarks/determinism_cost.py [--config configs/quickstart.yaml --rounds 30 section.key=value ...]

Steps of both kinds alternate, so that drift of the machine strikes both alike; the medians are compared, with the
quartiles of the ratio of neighbours beside them. The text is random. It prints one JSON object. Without a GPU it shows
the cost of torch's deterministic kernels on the CPU alone.
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
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.system import determinism, startup
from plumbline.launcher.runtime.system.world import World, read_world

VOCABULARY = 4096


def measure(config: Config, world: World, rounds: int) -> dict[bool, list[float]]:
    """Return the seconds of each step of each kind."""
    batches, engine = TrainBatches(config.data, 1, world.rank, world.size), DeepSpeedEngine(config, world)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds + 4):  # the first two of each kind warm up
        micro_batches, repeatable = batches.micro_batches(number), number % 2 == 1
        determinism.enforce(repeatable, world.device)
        start = time.perf_counter()
        engine.train_step(micro_batches, number, 1e-3).result.loss.item()
        if number >= 4:
            seconds[repeatable].append(time.perf_counter() - start)
    return seconds


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
        plain, repeatable = statistics.median(seconds[False]), statistics.median(seconds[True])
        neighbours = [after / before for before, after in zip(seconds[False], seconds[True], strict=True)]
        low, _, high = statistics.quantiles(neighbours)
        found = {"plain_seconds": plain, "deterministic_seconds": repeatable, "ratio": repeatable / plain}
        print(json.dumps({**facts, **found, "quartiles_of_the_ratio": [low, high]}, indent=2))
    startup.stop()


if __name__ == "__main__":
    main()
