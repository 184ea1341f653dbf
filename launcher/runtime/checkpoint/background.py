"""Write checkpoints in the background of training, which waits only while its state is copied to host memory.

At most one checkpoint is being written: a save waits for the previous one, so that host memory holds one copy. Ranks
agree on what was written in a separate thread, over a process group that no other thread uses.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from plumbline.launcher.runtime.checkpoint.commit import Pace, commit
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.snapshot import Snapshot
from plumbline.launcher.runtime.checkpoint.store import CheckpointError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.process_group import gloo_group
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import LOG, TRAINING

LOOK = 1.0
"""Seconds between heartbeats while training waits for a save."""


@dataclass(frozen=True)
class SaveOutcome:
    """Hold how the writing of a checkpoint ended; `CheckpointWriter.finish` returns the same on all ranks."""

    step: int
    error: CheckpointError | None
    """Why it was not written, or None if it was."""
    is_local: bool = False
    """Whether it was on the nodes, where a failure does no harm."""


class CheckpointWriter:
    """Take snapshots and write them, one at a time. All ranks call each method together.

    Args:
        config: the run.
        root: the folder of its checkpoints.
        world: this process among all; the process group must be up.
        local: checkpoints on the nodes, if enabled.
        heartbeat: called with a description while training waits for a save.
    """

    def __init__(
        self,
        config: Config,
        root: Path,
        world: World,
        local: LocalCheckpoints | None,
        heartbeat: Callable[[str], object],
    ) -> None:
        self._heartbeat, self._pace = heartbeat, Pace()
        self._settings, self._root, self._world, self._local = config.checkpoint, root, world, local
        self._minutes = config.deepspeed.timeout_minutes
        self._group = gloo_group(self._minutes)
        self._is_broken = False
        """Whether the group has failed on this rank, and cannot be used again."""
        self._thread: Thread | None = None
        self._last: SaveOutcome | None = None
        self._waited = 0.0  # seconds, for the previous checkpoint
        self.seconds: float | None = None
        """Seconds that writing the last checkpoint in the run folder took, set as soon as it is written."""
        self.written = 0
        """Step of that checkpoint; 0 before the first."""

    def finish(self) -> SaveOutcome | None:
        """Wait for the checkpoint being written and return how it ended, or None if there is none. Collective.

        Ranks agree on the result here: their process group may have failed on some of them, and is then recreated, so
        that later checkpoints can be written.
        """
        if self._thread is None:
            return None
        begun = time.monotonic()
        seen = self._pace.parts
        while self._thread.is_alive():
            self._thread.join(LOOK)
            if self._pace.waits or self._pace.parts > seen:
                seen = self._pace.parts
                self._heartbeat("waiting for a checkpoint")
        self._thread, self._waited = None, time.monotonic() - begun
        assert self._last is not None, "the thread says how it ended"
        told = gather_objects((self._last, self._is_broken), self._world)
        if any(is_broken for _, is_broken in told):
            dist.destroy_process_group(self._group)
            self._group, self._is_broken = gloo_group(self._minutes), False
        return next((saved for saved, _ in told if saved.error is not None), self._last)

    @property
    def is_writing(self) -> bool:
        """Return whether this rank is still writing, so that `finish` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, take: Callable[[], Snapshot], wait: bool, locally: bool = False) -> SaveOutcome | None:
        """Save the snapshot that `take` returns; `finish` must have been called. Collective.

        Args:
            take: makes the snapshot.
            wait: return only when it is written.
            locally: write a snapshot of each rank by itself to the nodes.

        Returns:
            How it ended, or None while it is being written.
        """
        assert self._thread is None, "finish first"
        begun = time.monotonic() - self._waited
        snapshot = take()
        wait_here = wait or not self._settings.background
        waited = None if wait_here else time.monotonic() - begun
        self._last = None  # so that after a bug in the thread it is not the previous result
        self._thread = Thread(target=self._write, args=(snapshot, waited, wait, locally), daemon=True)
        self._thread.start()
        ended = self.finish() if wait_here else None
        self._waited = 0.0
        return ended

    def close(self) -> None:
        """Destroy the process group. Collective; no checkpoint may be being written."""
        assert self._thread is None, "finish first"
        dist.destroy_process_group(self._group)

    def _write(self, snapshot: Snapshot, waited: float | None, must: bool, locally: bool) -> None:
        """Write a snapshot in the thread, and log it at once, because training checks only at its next save.

        Args:
            snapshot: what to write.
            waited: seconds that training waited for the copy, or None if it waits for the writing as well.
            must: whether the caller ends the run with the reason if this fails.
            locally: whether to write to the nodes.
        """
        begun, step = time.monotonic(), snapshot.facts["step"]
        try:
            if locally:
                assert self._local is not None
                folder = self._local.save(snapshot, self._group, self._pace)
            else:
                folder = commit(snapshot, self._root, self._settings, self._world, self._group, self._pace)
        except CheckpointError as error:
            self._fail(step, error, must, locally)
            return
        except RuntimeError as error:  # from the process group: a rank is late or dead, which will end training too
            self._is_broken = True
            cause = str(error).partition("\n")[0]
            why = (
                f"checkpoint not written, ranks lost each other ({cause}): if one writes for "
                f"deepspeed.timeout_minutes = {self._minutes:g} longer than another, raise that"
            )
            self._fail(step, CheckpointError(why), must, locally)
            return
        seconds = time.monotonic() - begun
        self._last = SaveOutcome(step, None, locally)
        if not locally:
            self.seconds, self.written = seconds, step
        behind = "" if waited is None else f", behind training, which waited {waited:.2f} s"
        TRAINING.info(f"saved {folder}: {snapshot.bytes / 2**20:.1f} MiB a rank in {seconds:.2f} s{behind}")

    def _fail(self, step: int, error: CheckpointError, must: bool, locally: bool) -> None:
        """Record in the thread that a checkpoint was not written; warn unless `must`: then the caller reports it."""
        self._last = SaveOutcome(step, error, locally)
        if not must:
            LOG.warning(f"step {step}: {error}. Training goes on, the next save tries again")
