"""Recompute steps as training made them, from a checkpoint or from the start, without writing anything."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plumbline.data.loader import TrainBatches
from plumbline.data.skipped import SkippedData
from plumbline.data.streams import IGNORED
from plumbline.launcher.runtime.checkpoint import resume
from plumbline.launcher.runtime.checkpoint.saved_tensors import SavedTensors
from plumbline.launcher.runtime.checkpoint.tensors import WEIGHT, collect
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.rank_counts import check_ranks
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.models.from_stock import fetch, initial_weights
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.chain import Step, digest_of
from plumbline.launcher.runtime.train import garbage
from plumbline.launcher.runtime.train.chain import SummedDigests
from plumbline.model.objectives.objective import Batch


class Replay:
    """Restore the state of a run and recompute its steps. All ranks must call all methods.

    Args:
        config: the run's configuration when the steps were made.
        skipped: the data that the run leaves out.
        world: this process's place among all; the process group must be initialised.

    Raises:
        ValueError: a corpus no longer exists, or the batch does not divide over this many ranks.
    """

    def __init__(self, config: Config, skipped: SkippedData, world: World) -> None:
        check_ranks(config, world.size)
        self._skipped = skipped
        self.config, self.world, self.plan = config, world, plan_run(config)
        # No vocabulary check: the digest detects changed ids before a model sees them
        self._batches = TrainBatches(config.data, config.run.seed, world.rank, world.size)
        self._engine: Engine | None = None
        self.step = 0
        """Number of steps made so far."""

    @property
    def engine(self) -> Engine:
        """Return the engine, once `go_to` has made it."""
        assert self._engine is not None, "go_to first"
        return self._engine

    def go_to(self, folder: Path | None) -> None:
        """Restore a checkpoint, or with None the start of the run, from its seed or its initial stock model.

        Raises:
            ValueError: the checkpoint or the stock model cannot be used.
        """
        if folder is None:
            self.close()
            fetch(self.config, self.world)
            self._engine = make_engine(self.config, self.world, initial_weights(self.config))
            self.step = 0
            return
        if self._engine is None:
            self._engine = make_engine(self.config, self.world, restored=True)
        self.step = resume.load(self._engine, folder).step

    def close(self) -> None:
        """Let go of the engine, so that another finds its memory free."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            garbage.collect_engine()

    def batches(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step."""
        return [*self._batches.micro_batches(self._skipped.data_step(self.step))]

    def digest(self, batches: Sequence[Batch]) -> str:
        """Return the chain's digest of the samples of these micro-batches, over all ranks."""
        return SummedDigests([digest_of(batches)], self.world).read()[0]

    def make(self, batches: Sequence[Batch], samples: str = "") -> Step:
        """Make the step that comes with these micro-batches, and return what it reports."""
        lr = self.plan.lr_after(self.plan.batch_plan.tokens_before(self.step))
        result = self.engine.train_step(batches, self.step, lr).result
        self.step += 1
        return Step(self.step, samples, result.loss.item(), result.grad_norm)

    def weights_unlike(self, folder: Path, tolerance: float | None) -> str | None:
        """Return which weight, optimizer state or average differs from a checkpoint, or None if none does.

        Args:
            folder: the checkpoint.
            tolerance: of the norm of a weight's difference relative to the weight; None requires bitwise equality of
                everything.
        """
        mine, _ = collect(self.engine)
        index = json.loads(mine.metadata["index"])
        with SavedTensors(folder) as saved:
            found = next(
                (key for key, value in mine.tensors.items() if _unlike(key, value, index, saved, tolerance)), None
            )
        return next((key for key in gather_objects(found, self.world) if key is not None), None)


def _unlike(key: str, value: Tensor, index: dict[str, Any], saved: SavedTensors, tolerance: float | None) -> bool:
    """Return whether a rank's part of a tensor differs from the checkpoint."""
    kind, _, name = key.partition("/")
    if tolerance is not None and kind != WEIGHT:
        return False  # moments of small gradients have no digits in common once the order of summation changes
    if kind in index[name]["whole"]:
        other = saved.whole(name)[kind]
    else:
        other = saved.read(kind, name, index[name]["start"], value.numel())
    if tolerance is None:
        return not torch.equal(value.view(torch.int32), other.view(torch.int32))
    return float((value - other).norm()) > tolerance * float(other.norm())


class Stash:
    """Save the state of a replay in memory: weights and optimizer state, but no moving average."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self._step, engine = replay, replay.step, replay.engine
        self._masters = [master.detach().clone() for master in engine.master_weights()]
        self._state = {shard: _copies(state) for shard, state in engine.optimizer_state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved state."""
        engine = self._replay.engine
        for master, kept in zip(engine.master_weights(), self._masters, strict=True):
            master.copy_(kept)
        engine.optimizer_state.clear()
        engine.optimizer_state.update({shard: _copies(state) for shard, state in self._state.items()})
        engine.refresh_weights()
        self._replay.step = self._step


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def without(batches: Sequence[Batch], samples: Collection[int]) -> list[Batch]:
    """Return micro-batches in which the labels of some samples are -100."""
    return [{**batch, "labels": _masked(batch, samples)} for batch in batches]


def _masked(batch: Batch, samples: Collection[int]) -> Tensor:
    chosen = torch.isin(batch["sample_index"], torch.tensor(sorted(samples), dtype=torch.int64))
    labels: Tensor = batch["labels"].masked_fill(chosen[:, None], IGNORED)
    return labels
