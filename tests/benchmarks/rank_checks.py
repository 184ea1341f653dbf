"""Measure what it costs that ranks check each other, and count false alarms: steps as they are, compared, replayed.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/rank_checks.py [--rounds 30 section.key=value]

Steps of all kinds alternate, so that drift of the machine strikes them alike; medians are compared. "replicas" compares
what all ranks keep whole after the step (guards.replica_interval), "replay" has a micro-batch of each rank computed by
another rank as well (guards.replay_interval; one rank does both). An alarm ends the program with the guard's error. The
text is random. It prints one JSON object; `share` is the part of training time at an interval of 100 steps.
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
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.system import determinism, startup
from plumbline.launcher.runtime.system.world import World, read_world
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.replay import Replay
from plumbline.launcher.runtime.train.guards.replicas import Replicas

VOCABULARY = 4096
INTERVAL = 100  # steps


def measure(config: Config, world: World, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each kind, "plain" first."""
    batches, engine = TrainBatches(config.data, 1, world.rank, world.size), make_engine(config, world)
    kinds: dict[str, Guard] = {"plain": Guard(), "replicas": Replicas(engine, 1), "replay": Replay(engine, 1)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 2):  # the first two of each kind warm up
        micro_batches = batches.micro_batches(number)
        for kind, guard in kinds.items():
            start = time.perf_counter()
            guard.before_step(number + 1, len(micro_batches))
            engine.train_step(micro_batches, number, 1e-3, [guard]).result.loss.item()
            if number >= 2:
                seconds[kind].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    world = read_world()
    determinism.enforce(True, world.device)
    startup.start(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "random"
        with IndexedWriter(corpus, token_dtype(VOCABULARY)) as writer:
            tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2_000_000, dtype=np.uint16)
            writer.add_documents(tokens, [len(tokens)])
        fixed = [f"data.train=[{{path: {corpus}}}]", f"model.vocab_size={VOCABULARY}"]
        seconds = measure(load_config(arguments.config, [*fixed, *arguments.overrides]), world, arguments.rounds)
    if world.is_main:
        medians = {kind: statistics.median(found) for kind, found in seconds.items()}
        plain = medians.pop("plain")
        facts = {
            "overrides": arguments.overrides,
            "ranks": world.size,
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
            "micro_batches_replayed": arguments.rounds * world.size,
            "alarms": 0,  # or it would not be here
            "plain_seconds": plain,
        }
        more = {kind: took - plain for kind, took in medians.items()}
        costs = {kind: {"more_seconds": took, "share": took / plain / INTERVAL} for kind, took in more.items()}
        print(json.dumps({**facts, **costs}, indent=2))
    startup.stop()


if __name__ == "__main__":
    main()
