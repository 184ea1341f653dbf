"""Save checkpoints of a run in training, when they are due or the run stops, and decide what failures end it."""

import time
from collections.abc import Callable
from dataclasses import replace

from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.background import CheckpointWriter, SaveOutcome
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.snapshot import Snapshot, take_snapshot
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.ranks.collectives import any_rank
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.train import garbage
from plumbline.launcher.runtime.train.chain import ChainWriter
from plumbline.launcher.runtime.train.guards import Guards
from plumbline.launcher.runtime.train.guards.guard import RollBack
from plumbline.launcher.runtime.train.guards.non_finite import NonFinite

PAUSES = (5.0, 15.0)
"""Seconds before an essential checkpoint is tried again: network disks fail for moments."""


class Saver:
    """Save what is trained, to the run folder or on the nodes. All ranks call each method together.

    Args:
        engine: what is trained, which knows the configuration.
        local: checkpoints on the nodes, if enabled.
        guards: check what is about to be saved, and are saved with it.
        chain: caught up with before each save.
        status: is told when training waits for a save.
        heartbeat: called with a description while training waits for a save.
    """

    def __init__(
        self,
        engine: Engine,
        local: LocalCheckpoints | None,
        guards: Guards,
        chain: ChainWriter,
        status: RunStatus,
        heartbeat: Callable[[str], object],
    ) -> None:
        config = engine.config
        self._config, self._engine, self._guards, self._chain, self._status = config, engine, guards, chain, status
        root = config.run.folder / CHECKPOINTS
        self.writer = CheckpointWriter(config, root, engine.world, local, heartbeat)
        self.saved_step: int | None = None
        """Step of the newest checkpoint in the run folder."""
        self._failures = 0
        """Saves there that failed since the last one that did not."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of a step is due, in the run folder or on the nodes."""
        return step == self._engine.plan.total_steps or self._due_in_folder(step) or self._due_on_nodes(step)

    def save_what_is_due(self, state: checkpoint.TrainState, stopping: bool) -> bool:
        """Save the current state if that is due, or the run is `stopping`. Returns whether it was due and trusted."""
        must, trusted = stopping or state.step == self._engine.plan.total_steps, self._guards.trusts_weights
        if must or (self._due_in_folder(state.step) and trusted):
            self.save(state, must)
        elif self._due_on_nodes(state.step) and trusted:
            self._save_on_nodes(state)
        else:
            return False
        return True

    def _due_in_folder(self, step: int) -> bool:
        interval = self._config.checkpoint.interval
        return interval is not None and step % interval == 0

    def _due_on_nodes(self, step: int) -> bool:
        local = self._config.checkpoint.local
        return local is not None and step % local.interval == 0

    def _save_on_nodes(self, state: checkpoint.TrainState) -> None:
        """Save on the nodes, unless the last checkpoint is still being written: training would have to wait for it."""
        if any_rank(self.writer.is_writing, self._engine.world):
            TRAINING.info(f"step {state.step}: not saved locally, another checkpoint is still being written")
        else:
            self.save(state, must=False, locally=True)

    def save(self, state: checkpoint.TrainState, must: bool = True, locally: bool = False) -> None:
        """Save a checkpoint in the background; with `must` it is written when this returns.

        Raises:
            RollBack: a weight is not finite.
            TrainingError: ranks differ in what is to be saved.
            UnsavedError: a checkpoint with `must`, or too many in a row, could not be written.
        """
        self._status.enter("checkpoint")
        self._guards.before_save(state.step)
        garbage.collect()
        self.finish()
        self._chain.catch_up(None if locally else self.writer.written)

        def take() -> Snapshot:
            return take_snapshot(self._engine, replace(state, guards=self._guards.state), locally)

        try:
            ended = self.writer.save(take, must, locally)
            for pause in PAUSES if must else ():
                if ended is None or ended.error is None:
                    break
                LOG.warning(f"step {state.step}: {ended.error}. Trying again in {pause:g} s")
                time.sleep(pause)
                ended = self.writer.save(take, must, locally)
        except checkpoint.BrokenWeightsError as error:
            raise RollBack(NonFinite.name, state.step, state.step, str(error)) from error
        self._count(ended, must)

    def finish(self) -> None:
        """Wait for the checkpoint being written, if there is one.

        Raises:
            UnsavedError: too many in a row could not be written.
        """
        self._count(self.writer.finish(), must=False)

    def _count(self, saved: SaveOutcome | None, must: bool) -> None:
        """Record how a save ended, or nothing if None: it is still running. Failures on the nodes do not count."""
        if saved is None or saved.is_local:
            return
        if saved.error is None:
            self.saved_step, self._failures = saved.step, 0
            return
        self._failures += 1
        limit = self._config.checkpoint.max_failures
        if must:
            raise checkpoint.UnsavedError(f"{saved.error} and start the same command again") from saved.error
        if self._failures >= limit:
            raise checkpoint.UnsavedError(
                f"{saved.error} and start the same command again; {limit} checkpoints in a row were not written "
                "(checkpoint.max_failures)"
            ) from saved.error
