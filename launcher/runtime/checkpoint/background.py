"""Write checkpoints behind training, which waits only while its state is copied to host memory.

At most one checkpoint is being written: a save waits for the one before, so that host memory holds one copy. Ranks
agree on what was written in a thread of their own, over a process group that no other thread uses.
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
from plumbline.launcher.runtime.system.collectives import gather_objects
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.system.process_group import gloo_group
from plumbline.launcher.runtime.system.world import World

LOOK = 1.0
"""Seconds between looks at a save that training waits for."""


@dataclass(frozen=True)
class Saved:
    """Say how a checkpoint ended; what `CheckpointWriter.finish` returns is the same on all ranks."""

    step: int
    error: CheckpointError | None
    """Why it was not written; None: it was."""
    is_local: bool = False
    """Whether it was one on the nodes, which nothing depends on."""


class CheckpointWriter:
    """Take snapshots and write them, one at a time. All ranks call each method together.

    Args:
        config: of the run.
        root: the folder of its checkpoints.
        world: this process among all; the process group must be up.
        local: those on the nodes, if there are any.
        heartbeat: is told, in words, that a save goes on for which training waits.
    """

    def __init__(
        self,
        config: Config,
        root: Path,
        world: World,
        local: LocalCheckpoints | None = None,
        heartbeat: Callable[[str], object] = lambda _doing: None,
    ) -> None:
        self._heartbeat, self._pace = heartbeat, Pace()
        self._settings, self._root, self._world, self._local = config.checkpoint, root, world, local
        self._minutes = config.deepspeed.timeout_minutes
        self._group = gloo_group(self._minutes)
        self._is_broken = False
        """Whether the group has failed on this rank; it serves for nothing more then."""
        self._thread: Thread | None = None
        self._last: Saved | None = None
        self._waited = 0.0  # seconds, for the checkpoint before
        self.seconds: float | None = None
        """How long the last checkpoint in the run folder was being written, known as soon as it is."""
        self.written = 0
        """Step of that checkpoint; 0 before the first."""

    def finish(self) -> Saved | None:
        """Wait for the checkpoint that is being written and return how it ended; None: there is none. Collective.

        Ranks agree on that here: the group over which they wrote may have failed on some of them, and is then made
        anew, or no checkpoint would ever be written again.
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
        """Return whether this rank is still writing: whoever calls `finish` now waits."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, take: Callable[[], Snapshot], wait: bool, locally: bool = False) -> Saved | None:
        """Save what `take` returns, once `finish` was called. Collective.

        Args:
            take: makes the snapshot.
            wait: return only when it is written.
            locally: write to the nodes a snapshot of each rank by itself.

        Returns:
            How it ended; None while it is being written.
        """
        assert self._thread is None, "finish first"
        begun = time.monotonic() - self._waited
        snapshot = take()
        wait_here = wait or not self._settings.background
        waited = None if wait_here else time.monotonic() - begun
        self._last = None  # a bug in the thread must not pass for the end of the checkpoint before
        self._thread = Thread(target=self._write, args=(snapshot, waited, wait, locally), daemon=True)
        self._thread.start()
        ended = self.finish() if wait_here else None
        self._waited = 0.0
        return ended

    def close(self) -> None:
        """Give the process group back. Collective; nothing is being written any more."""
        assert self._thread is None, "finish first"
        dist.destroy_process_group(self._group)

    def _write(self, snapshot: Snapshot, waited: float | None, must: bool, locally: bool) -> None:
        """Write a snapshot, in the thread; say so at once, because training asks only at its next save.

        Args:
            snapshot: what to write.
            waited: seconds that training waited for the copy; None: it waits for the writing as well.
            must: whether whoever waits ends the run if this fails, and says why.
            locally: to the nodes.
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
        except RuntimeError as error:  # of the group: a rank is late, or has died, and then training ends by that
            self._is_broken = True
            cause = str(error).partition("\n")[0]
            why = (
                f"checkpoint not written, ranks lost each other ({cause}): if one writes for "
                f"deepspeed.timeout_minutes = {self._minutes:g} longer than another, raise that"
            )
            self._fail(step, CheckpointError(why), must, locally)
            return
        seconds = time.monotonic() - begun
        self._last = Saved(step, None, locally)
        if not locally:
            self.seconds, self.written = seconds, step
        behind = "" if waited is None else f", behind training, which waited {waited:.2f} s"
        TRAINING.info(f"saved {folder}: {snapshot.bytes / 2**20:.1f} MiB a rank in {seconds:.2f} s{behind}")

    def _fail(self, step: int, error: CheckpointError, must: bool, locally: bool) -> None:
        """Note that a checkpoint was not written, in the thread; whoever `must` have it says so otherwise."""
        self._last = Saved(step, error, locally)
        if not must:
            LOG.warning(f"step {step}: {error}. Training goes on, the next save tries again")
