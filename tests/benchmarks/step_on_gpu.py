"""Find what a step does on a GPU that a CPU cannot show: where the host waits for it, and how much memory it takes.

    python tests/benchmarks/step_on_gpu.py [--config configs/gpt2-124m.yaml] [--steps 4] [section.key=value ...]

It trains some steps as training does. Then torch tells of every call of --steps more that makes the host wait
(`torch.cuda.set_sync_debug_mode`): `waits` names the lines, with how often they wait in a step. The peak of allocated
memory of those steps stands beside the estimate of plan.py. `first_step_seconds` holds compilation; `tokens_per_second`
is of the same few steps. The text is random. It prints one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`, however this file is started

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.budget import GIB
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.engine.stage import assumed_machine, estimate_stages
from plumbline.launcher.runtime.engine.step_result import StepUnderWay
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.memory import device_bytes
from plumbline.launcher.runtime.ranks.world import World, read_world
from tests.benchmarks.step_cost import on_random_text, setting_of


class Training:
    """Train as a run does, but for what is not a step."""

    def __init__(self, config: Config, world: World) -> None:
        self.engine = DeepSpeedEngine(config, world)
        self._batches = TrainBatches(config.data, 1, world.rank, world.size, gpu=world.device.index)
        self._under_way: list[StepUnderWay] = []
        self._number = 0

    def steps(self, count: int) -> None:
        """Make steps, each read once the next is given to the device."""
        for batches in [self._batches.micro_batches(self._number + each) for each in range(count)]:
            self._under_way.append(self.engine.train_step(batches, self._number, 1e-3))
            self._number += 1
            if len(self._under_way) > 1:
                _ = self._under_way.pop(0).result

    def finish(self) -> None:
        """Wait for the step that is under way."""
        _ = self._under_way.pop().result


def waits(training: Training, steps: int) -> dict[str, float]:
    """Return where the host waits for the device, with how often in a step."""
    seen: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            frames = [
                f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in traceback.extract_stack()[:-1]
            ]
            seen[" < ".join(reversed(frames[-4:]))] += 1

    wait_for_all = torch.cuda.synchronize  # of which torch does not tell

    def noted(*arguments: Any) -> None:
        note("synchronizing")
        wait_for_all(*arguments)

    with warnings.catch_warnings(), patch.object(torch.cuda, "synchronize", noted):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.showwarning = note
        training.steps(steps)
        torch.cuda.set_sync_debug_mode("default")
    return {place: times / steps for place, times in seen.most_common()}


def measure(config: Config, world: World, steps: int) -> dict[str, Any]:
    """Train a configuration, and return what was found."""
    stage = config.deepspeed.zero_stage
    assert isinstance(stage, int)
    machine = assumed_machine(config, world.size)
    expected = estimate_stages(config, plan_run(config).rows, [stage], machine, device_bytes(world), world.device)
    training = Training(config, world)
    start = time.perf_counter()
    training.steps(1)
    training.finish()
    first = time.perf_counter() - start
    training.steps(4)
    training.finish()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    training.steps(steps)
    training.finish()
    seconds = (time.perf_counter() - start) / steps
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    training.steps(1)
    found = waits(training, steps)
    training.finish()
    return {
        "first_step_seconds": round(first, 1),
        "tokens_per_second": round(config.data.global_batch_size * config.data.sequence_length / seconds),
        "peak_gib": round(peak / GIB, 2),
        "estimated_gib": round(expected[stage].memory.total / GIB, 2),
        "reserved_gib": round(reserved / GIB, 2),
        "waits": found,
    }


def main() -> None:
    """Measure one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/gpt2-124m.yaml"))
    parser.add_argument("--steps", type=int, default=4, help="that are watched (default: 4)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    world = read_world()
    if world.device.type != "cuda":
        raise SystemExit("no GPU is visible: there is nothing to wait for")
    process_group.join(world, timeout_minutes=10)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(on_random_text(arguments, Path(folder)), world, arguments.steps)
    print(json.dumps({**setting_of(arguments, world), **found}, indent=2))
    process_group.leave()


if __name__ == "__main__":
    main()
