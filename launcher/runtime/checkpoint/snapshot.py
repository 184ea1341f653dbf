"""Take a snapshot of training: the first half of a save, in which all ranks exchange what they need."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.launcher.runtime.checkpoint.store import (
    CONFIG,
    EMA_WEIGHTS,
    STATE,
    WEIGHTS,
    BrokenWeightsError,
    TrainState,
    average_shard,
)
from plumbline.launcher.runtime.checkpoint.weights import TensorFile, weight_files
from plumbline.launcher.runtime.config.load import as_yaml
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.interface import Engine
from plumbline.launcher.runtime.system.collectives import gather_objects
from plumbline.launcher.runtime.system.world import World


@dataclass(frozen=True)
class Snapshot:
    """Hold what one rank writes of a checkpoint, copied to host memory: training may go on while it is written.

    These are this rank's shards of the optimizer states and of the moving average, and its share of the files of fp32
    weights. Together the ranks hold what the checkpoint takes on disk.
    """

    files: dict[str, Any]
    """Name within the checkpoint -> a text, a TensorFile, or an object that torch.save writes."""
    facts: dict[str, Any]
    """What the manifest says of the checkpoint as a whole; the same on all ranks."""


def take_snapshot(engine: Engine, config: Config, state: TrainState, world: World) -> Snapshot:
    """Copy what a checkpoint of `state` consists of to host memory. Collective.

    Raises:
        BrokenWeightsError: a weight is not finite.
    """
    files: dict[str, Any] = dict(weight_files(engine.fp32_weights(), WEIGHTS, world.rank, world.size))
    _check_finite(files.values(), world)
    files |= engine.snapshot()
    if engine.ema is not None:
        files[average_shard(world.rank)] = TensorFile(*engine.ema.snapshot())
        with engine.ema.in_place():
            files |= weight_files(engine.fp32_weights(), EMA_WEIGHTS, world.rank, world.size)
    if world.is_main:
        files[CONFIG] = as_yaml(config)
        files[STATE] = json.dumps(asdict(state), indent=2) + "\n"
    facts = {
        "world_size": world.size,
        "zero_stage": config.deepspeed.zero_stage,
        "precision": config.deepspeed.precision,
        **asdict(state),
    }
    return Snapshot(files, facts)


def _check_finite(files: Iterable[TensorFile], world: World) -> None:
    """Raise BrokenWeightsError on all ranks if a tensor in the files of any of them is not finite."""
    mine = [name for file in files for name, tensor in file.tensors.items() if not tensor.isfinite().all()]
    broken = [name for share in gather_objects(mine, world) for name in share]
    if broken:
        raise BrokenWeightsError(f"{len(broken)} tensors hold weights that are not finite, {broken[0]} for one")
