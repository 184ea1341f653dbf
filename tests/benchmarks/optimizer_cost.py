"""Compare what optimizers cost: seconds of a whole step of the engine with each, on the same batches.

    python tests/benchmarks/optimizer_cost.py [--config configs/quickstart.yaml --rounds 40 section.key=value ...]

Steps of the optimizers alternate in one process; means are compared, for SOAP renews its bases every few steps
(`optimizer.precondition_frequency`), and --rounds should be a multiple of that. `ratio` is over AdamW's. One
micro-batch a step, so that the update weighs as much as it can, at ZeRO stage 0, which serves all of them. The text is
random. It prints one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world
from tests.benchmarks.step_cost import on_random_text, parse_arguments, setting_of
from tests.benchmarks.turns import Way, compared, take_turns


def make_way(config: Config, world: World) -> Way:
    """Return a step with the configuration's optimizer."""
    engine = DeepSpeedEngine(config, world)
    batch = TrainBatches(config.data, 1, world.rank, world.size).micro_batches(0)[:1]
    return lambda: engine.train_step(batch, 1, 1e-4).result.loss.item()


def main() -> None:
    """Measure one configuration."""
    arguments = parse_arguments(__doc__, rounds=40)
    arguments.overrides.append("deepspeed.zero_stage=0")
    world = read_world()
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        ways = {}
        for name in ("adamw", "muon", "soap"):
            asked = argparse.Namespace(
                **{**vars(arguments), "overrides": [*arguments.overrides, f"optimizer.name={name}"]}
            )
            ways[name] = make_way(on_random_text(asked, Path(folder)), world)
        results = compared(take_turns(ways, arguments.rounds, world.device, statistics.mean), "optimizer")
    if world.is_main:
        print(json.dumps({"setting": setting_of(arguments, world), "results": results}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
