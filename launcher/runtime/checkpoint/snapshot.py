"""Take a snapshot of training, the first half of a save: each rank copies its part of a checkpoint to host memory."""

import json
from dataclasses import dataclass
from typing import Any

from plumbline.launcher.runtime.checkpoint.store import CONFIG, STATE, BrokenWeightsError, TrainState
from plumbline.launcher.runtime.checkpoint.tensors import collect, shard_name
from plumbline.launcher.runtime.checkpoint.weights import TensorFile
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World


@dataclass(frozen=True)
class Snapshot:
    """Hold what one rank writes to a checkpoint, copied to host memory, so that training can go on meanwhile."""

    files: dict[str, TensorFile | str]
    """Name within the checkpoint -> tensors or text: the rank's part of a checkpoint, or all it needs to resume."""
    facts: dict[str, Any]
    """Facts about the whole checkpoint for the manifest; the same on all ranks."""

    @property
    def bytes(self) -> int:
        """Return the host memory that this rank's tensors take."""
        files = (file for file in self.files.values() if isinstance(file, TensorFile))
        return sum(tensor.nbytes for file in files for tensor in file.tensors.values())


def take_snapshot(engine: Engine, state: TrainState, locally: bool) -> Snapshot:
    """Copy the contents of a checkpoint of `state` to host memory. Collective.

    Args:
        engine: the engine to save.
        state: the training state.
        locally: hold all that this rank keeps, so that it can resume from its own files alone; else the ranks divide
            what several of them keep, and together hold the checkpoint once.

    Raises:
        BrokenWeightsError: a weight is not finite.
    """
    world, deepspeed = engine.world, engine.config.deepspeed
    mine, broken = collect(engine, locally)
    _refuse_broken(broken, world)
    files: dict[str, TensorFile | str] = {shard_name(world.rank): mine}
    if world.is_main or locally:
        files[CONFIG] = engine.written_config
        files[STATE] = json.dumps(state.to_json(), indent=2) + "\n"
    facts = {
        "world_size": world.size,
        "zero_stage": deepspeed.zero_stage,
        "precision": deepspeed.precision,
        **state.facts,
    }
    return Snapshot(files, facts)


def _refuse_broken(broken: list[str], world: World) -> None:
    """Raise BrokenWeightsError on all ranks if a tensor on any of them is broken."""
    broken = sorted({name for share in gather_objects(broken, world) for name in share})
    if broken:
        raise BrokenWeightsError(f"{len(broken)} tensors hold weights that are not finite, {broken[0]} for one")
