"""A program for tests to start on several ranks: which tensors are there while a rank trains, in bytes.

    measure_memory.py CONFIG OUTPUT SETTINGS

SETTINGS is a JSON object of names and overrides. Rank 0 writes, by setting: `between`, the bytes of all tensors before
the third step, and `peak`, the most that were there in the course of it; and beside each what plan.py's estimate has.
"""

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.activations import LiveMemory
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.engine.memory import Estimate
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world


def all_tensors() -> list[torch.Tensor]:
    """Return every tensor of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who looks at everything meets what is deprecated
        return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def measure(file: Path, overrides: list[str], world: World) -> dict[str, Any]:
    """Train for three steps, and return what was there in the third one."""
    gc.collect()
    counted = {tensor.untyped_storage().data_ptr() for tensor in all_tensors()}
    config = load_config(file, overrides)
    engine = make_engine(config, world)
    batches = TrainBatches(config.data, config.run.seed, world.rank, world.size)
    for step in range(2):
        assert engine.train_step(batches.micro_batches(step), step, 1e-3).result.applied
    gc.collect()
    memory = LiveMemory()
    for tensor in all_tensors():
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.untyped_storage().data_ptr() not in counted:  # some lie twice in one place
                counted.add(each.untyped_storage().data_ptr())
                memory.count(each.untyped_storage())
    between = memory.now
    micro_batches = batches.micro_batches(2)
    with memory:
        engine.train_step(micro_batches, 2, 1e-3)
    count, stage = totals(engine.plan.rows), config.deepspeed.zero_stage
    estimate = Estimate(config, count, world.size, on_gpu=False).memory(stage, "none")
    return {
        "parameters": count.total,
        "between": between,
        "peak": memory.peak,
        "estimated": estimate.total + estimate.host,
        "activations": estimate.activations,
    }


def main() -> None:
    file, output, settings = sys.argv[1:]
    world = read_world()
    process_group.join(world, timeout_minutes=5.0)
    found = {name: measure(Path(file), overrides, world) for name, overrides in json.loads(settings).items()}
    if world.is_main:
        Path(output).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a Python that ends among them


if __name__ == "__main__":
    main()
