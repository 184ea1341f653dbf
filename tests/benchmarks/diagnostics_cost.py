"""Measure what diagnostics cost: seconds of an observed step against those of one that is not, in one process.

    python tests/benchmarks/diagnostics_cost.py [--config configs/quickstart.yaml --rounds 15 section.key=value ...]

Steps of both kinds alternate, so that drift of the machine strikes both alike; the medians are compared. The observed
step is timed whole: forward, statistics, sums over ranks, the look at the update, the line in metrics.jsonl and
TensorBoard. The text is random. It prints one JSON object; `share` is the part of training time at the configuration's
metrics.diagnostics_interval. Use one process with all cores (the default) or `torchrun --nproc-per-node N`.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.run.metrics import MetricsLog
from plumbline.launcher.runtime.trackers.feed import Feed
from plumbline.launcher.runtime.trackers.kind import TrackedRun
from plumbline.launcher.runtime.trackers.tensorboard import TensorBoard
from plumbline.launcher.runtime.train.diagnostics import StepObserver
from plumbline.model.objectives.objective import Batch
from tests.benchmarks.step_cost import on_random_text, parse_arguments, setting_of


def measure(config: Config, world: World, folder: Path, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each kind."""
    batches, engine = TrainBatches(config.data, 1, world.rank, world.size), DeepSpeedEngine(config, world)
    run = TrackedRun(folder, "plumbline", {}, {})
    log = None
    if world.is_main:
        log = MetricsLog(folder, 0, 1000, lambda before: [Feed("tensorboard", TensorBoard, run, before)])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds + 4):  # the first two of each kind warm up
        micro_batches, observed = batches.micro_batches(number), number % 2 == 1
        dist.barrier()
        start = time.perf_counter()
        step(engine, micro_batches, number, config, log, observed)
        if number >= 4:
            seconds[observed].append(time.perf_counter() - start)
    if log is not None:
        log.close()
    return {"plain_seconds": statistics.median(seconds[False]), "observed_seconds": statistics.median(seconds[True])}


def step(
    engine: Engine, micro_batches: Sequence[Batch], number: int, config: Config, log: MetricsLog | None, observed: bool
) -> None:
    """Take one training step, as the loop makes it."""
    observers = [StepObserver(engine, micro_batches[0], config.metrics.diagnostics_tokens)] if observed else []
    engine.train_step(micro_batches, number, 1e-3, observers).result.loss.item()
    for observer in observers:
        record = {"step": number, "tokens": number, **observer.record()}
        if log is not None:
            log.write(record)


def main() -> None:
    """Measure one configuration."""
    arguments = parse_arguments(__doc__, rounds=15)
    world = read_world()
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        config = on_random_text(arguments, Path(folder))
        found = measure(config, world, Path(folder), arguments.rounds)
    if world.is_main:
        plain, observed, interval = (
            found["plain_seconds"],
            found["observed_seconds"],
            config.metrics.diagnostics_interval,
        )
        assert interval is not None, "metrics.diagnostics_interval = null measures nothing"
        facts = {
            **setting_of(arguments, world),
            "interval": interval,
        }
        share = (observed - plain) / (interval * plain)
        print(json.dumps({**facts, **found, "ratio": observed / plain, "share": share}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
