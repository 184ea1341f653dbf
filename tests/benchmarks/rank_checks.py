"""Measure what it costs that ranks check each other, and count false alarms: steps as they are, compared, replayed.

    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/rank_checks.py [--rounds 30 section.key=value]

Steps of all kinds alternate, so that drift of the machine strikes them alike, and each is compared with the plain one
beside it: medians of the differences. "replicas" compares what all ranks keep whole after the step
(guards.replica_interval), "replay" has a micro-batch of each rank computed by another rank as well
(guards.replay_interval; one rank does both). An alarm ends the program with the guard's error. The text is random. It
prints one JSON object, by the clock and by the processor time of rank 0, which other work on a machine with no GPU does
not lengthen; `share` is the part of a run at an interval of 100 steps.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.checksum import checksum
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.system import determinism
from plumbline.launcher.runtime.train.guards.guard import Guard
from plumbline.launcher.runtime.train.guards.replay import Replay
from plumbline.launcher.runtime.train.guards.replicas import Replicas
from tests.benchmarks.step_cost import on_random_text, parse_arguments, setting_of

INTERVAL = 100  # steps
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLOCKS = {"by_the_clock": time.perf_counter, "of_the_processor": time.process_time}


def measure(config: Config, world: World, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return clock -> kind -> the seconds of each step, "plain" first."""
    batches, engine = TrainBatches(config.data, 1, world.rank, world.size), make_engine(config, world)
    kinds: dict[str, Guard] = {"plain": Guard(), "replicas": Replicas(engine, 1), "replay": Replay(engine, 1)}
    seconds: dict[str, dict[str, list[float]]] = {clock: {kind: [] for kind in kinds} for clock in CLOCKS}
    for number in range(rounds + 2):  # the first two of each kind warm up
        micro_batches = batches.micro_batches(number)
        for kind, guard in kinds.items():
            begun = {clock: read() for clock, read in CLOCKS.items()}
            guard.before_step(number + 1, len(micro_batches))
            engine.train_step(micro_batches, number, 1e-3, [guard]).result.loss.item()
            for clock, read in CLOCKS.items() if number >= 2 else ():
                seconds[clock][kind].append(read() - begun[clock])
    return seconds


def compared(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Return the median of plain steps, and of each other kind what its steps take more than their neighbours."""
    plain = statistics.median(seconds["plain"])
    found: dict[str, object] = {"plain_seconds": plain}
    for kind in ("replicas", "replay"):
        more = [took - beside for took, beside in zip(seconds[kind], seconds["plain"], strict=True)]
        low, middle, high = statistics.quantiles(more)
        found[kind] = {"more_seconds": middle, "quartiles": [low, high], "share": middle / plain / INTERVAL}
    return found


def checksum_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return how many numbers of a large tensor a checksum takes in a second: of the processor, or by a GPU's clock."""
    tensor, seconds = torch.ones(10**7, dtype=dtype, device=device), []
    read = time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(10):
        begun = read()
        checksum(tensor).tolist()  # waits for the device
        seconds.append(read() - begun)
    return tensor.numel() / statistics.median(seconds)


def main() -> None:
    """Measure one configuration."""
    arguments = parse_arguments(__doc__, rounds=30)
    world = read_world()
    determinism.enforce(True, world.device)
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(on_random_text(arguments, Path(folder)), world, arguments.rounds)
    if world.is_main:
        facts = {
            **setting_of(arguments, world),
            "micro_batches_replayed": arguments.rounds * world.size,
            "alarms": 0,  # or it would not be here
            "checksum_of_numbers_per_second": {
                name: checksum_rate(dtype, world.device) for name, dtype in DTYPES.items()
            },
        }
        print(json.dumps(facts | {clock: compared(its) for clock, its in seconds.items()}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
