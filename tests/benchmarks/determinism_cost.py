"""Measure what the same bits cost: seconds of a step as it is, with run.deterministic, and with run.reproducible.

    python tests/benchmarks/determinism_cost.py [--config configs/quickstart.yaml --rounds 30 section.key=value ...]
    python -m torch.distributed.run --nproc-per-node 2 tests/benchmarks/determinism_cost.py data.micro_batch_size=8

Steps of all kinds alternate, so that drift of the machine strikes them alike; medians are compared, with the quartiles
of the ratio of neighbours beside them. The text is random. It prints one JSON object. Without a GPU it shows what
torch's deterministic kernels cost on the CPU alone. A rank of run.reproducible has one thread there, as all do here.
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
from plumbline.launcher.runtime.engine.any_ranks import AnyRanksEngine
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.system import determinism
from tests.benchmarks.step_cost import on_random_text, parse_arguments, setting_of


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
    arguments = parse_arguments(__doc__, rounds=30)
    world = read_world()
    determinism.enforce(True, world.device)  # ahead of the first use of a GPU
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(on_random_text(arguments, Path(folder)), world, arguments.rounds)
    if world.is_main:
        facts = {
            **setting_of(arguments, world),
        }
        ways = {kind: compared(found, seconds["plain"]) for kind, found in seconds.items()}
        print(json.dumps({**facts, "ways": ways}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
