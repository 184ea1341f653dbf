"""A program for tests to start on several ranks: what a step in the steady state asks of the host and of the network.

    step_budget.py CONFIG OUTPUT SETTINGS

SETTINGS is a JSON object of names and overrides. The third step of each is made under two modes that see every
operator, and rank 0 writes what they saw, by setting: `reads`, the operators that wait for a value; `small`, how many
collectives send less than a KiB; `large`, of the others a row [operator, dtype, count, bytes] for each kind; `early`,
the bytes of sums among these that are sent before the last matrix product of the step; `parameters` of the model;
`garbage`, how many tensors a step leaves for the garbage collector.
"""

import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.data.loader import TrainBatches
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.engine.deepspeed import DeepSpeedEngine
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.world import World, read_world

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}
"""Operators whose result, or its shape, the host needs."""
SMALL = 1024  # bytes
PRODUCTS = {"mm", "addmm", "bmm"}
COPYING = {"tolist", "numpy", "cpu"}
"""Methods that bring values to the host by no operator, where tensors are there already."""


class Operators(TorchDispatchMode):
    """Count what waits, and what is sent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()
        self.small = 0
        self.large: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.early = 0
        self._summed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING or (
            name == "index" and any(mask is not None and mask.dtype == torch.bool for mask in args[1])
        ):
            self.reads[name] += 1
        if name in PRODUCTS:
            self.early = self._summed
        if func.namespace == "c10d":
            tensors = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
            largest = max(tensors, key=lambda tensor: tensor.nbytes)  # of what all ranks give or get together
            if largest.nbytes < SMALL:
                self.small += 1
            else:
                kind = name.strip("_"), str(largest.dtype).removeprefix("torch.")
                self.large[kind] += 1
                self.bytes[kind] += largest.nbytes
                self._summed += largest.nbytes if "reduce" in name else 0
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Count methods of tensors that bring values to the host."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in COPYING:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def measure(file: Path, overrides: list[str], world: World) -> dict[str, Any]:
    config = load_config(file, overrides)
    engine = DeepSpeedEngine(config, world)
    batches = TrainBatches(config.data, config.run.seed, world.rank, world.size)
    made = [engine.train_step(batches.micro_batches(step), step, 1e-3).result for step in range(2)]
    assert all(each.applied for each in made)
    micro_batches = batches.micro_batches(2)
    seen = Operators()
    with seen, Methods(seen.reads):
        under_way = engine.train_step(micro_batches, 2, 1e-3)
    assert under_way.result.applied
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    engine.train_step(batches.micro_batches(3), 3, 1e-3).result  # noqa: B018 - it waits
    gc.collect()
    garbage = sum(isinstance(each, torch.Tensor) for each in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    return {
        "reads": dict(seen.reads),
        "small": seen.small,
        "large": [[*kind, seen.large[kind], seen.bytes[kind]] for kind in sorted(seen.large)],
        "early": seen.early,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters()),
        "garbage": garbage,
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
