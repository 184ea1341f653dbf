"""Measure what it costs that ranks check each other, and count false alarms: steps as they are, compared, replayed.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/rank_checks.py [--rounds 30 section.key=value]

Steps of all kinds alternate, so that drift of the machine strikes them alike; medians are compared. "replicas" compares
what all ranks keep whole after the step (guards.replica_interval), "replay" has a micro-batch of each rank computed by
another rank as well (guards.replay_interval; one rank does both). An alarm ends the program with the guard's error. The
text is random. It prints one JSON object; `share` is the part of training time at an interval of 100 steps.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.system import determinism, startup
from plumbline.launcher.runtime.system.world import World, read_world
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.replay import Replay
from plumbline.launcher.runtime.train.guards.replicas import Replicas
from tests.benchmarks.step_cost import on_random_text, parse_arguments, setting_of

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
    arguments = parse_arguments(__doc__, rounds=30)
    world = read_world()
    determinism.enforce(True, world.device)
    startup.start(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(on_random_text(arguments, Path(folder)), world, arguments.rounds)
    if world.is_main:
        medians = {kind: statistics.median(found) for kind, found in seconds.items()}
        plain = medians.pop("plain")
        facts = {
            **setting_of(arguments, world),
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
