"""Keep a run's status and ledger while this process works on it; `status_file.py` has the files that others read.

The loop only reports what it begins to do. A thread writes it, every few seconds and at every change, so that steps do
not wait for a slow disk. A full disk causes a warning.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from plumbline.data.disk import AWAY
from plumbline.launcher.runtime.cluster import launch
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.ledger import Attempt, Bucket, Ledger, seconds_until
from plumbline.launcher.runtime.run.lock import LEASE_SECONDS, RunLockedError, hold
from plumbline.launcher.runtime.run.status_file import (
    ATTEMPTS,
    INTERVAL,
    RESULT,
    STATUS,
    SavedCheckpoint,
    Status,
    read_attempts,
    read_status,
    state_after,
    that_counts,
    with_last,
    write_attempts,
)
from plumbline.launcher.runtime.system.exit_codes import COMPLETE, CRASHED, INTERRUPTED, UNREACHED
from plumbline.launcher.runtime.system.files import remove_leftovers, write_json
from plumbline.launcher.runtime.system.log import LOG

DOING: dict[Bucket, str] = {
    "start_up": "starting",
    "compile": "training",
    "steps": "training",
    "data_wait": "training",
    "checkpoint": "saving",
    "evaluation": "evaluating",
    "shutdown": "ending",
}
"""State of a running run, by the bucket that its time is charged to."""
PAUSE = 0.5  # minimum seconds between two writes
PATIENCE = 5.0  # seconds that the end of an attempt waits for a write in progress
POINTS = 64  # newest saves whose time is kept: no resume goes back further
REACHED = ("step", "tokens", "loss", "tokens_per_second")
"""Fields on the progress of training; a start that never reaches training leaves them unchanged."""
ASKED = ("total_steps", "total_tokens")
"""Fields on the length of training; a refused start leaves them unchanged too, but a running one may raise them."""
WHY_LENGTH = 500  # characters of an error that are kept

T = TypeVar("T")
Newest = Callable[[Path], SavedCheckpoint | None]
"""Finds the newest checkpoint in a run folder."""


@contextmanager
def begin_attempt(folder: Path, world: World, newest: Newest) -> Iterator["RunStatus"]:
    """Hold the lock of a run folder on rank 0 and keep the run's status there. All ranks must call.

    Args:
        folder: the run folder.
        world: this process among all.
        newest: finds the newest checkpoint.

    Raises:
        RunLockedError: on all ranks, if another process holds the lock.
        OSError: on all ranks, if the folder cannot be written.
    """
    held: list[Callable[[], bool]] = []
    with ExitStack() as stack:
        from_main(lambda: held.append(stack.enter_context(hold(folder, LEASE_SECONDS, folder / STATUS))), world)
        yield stack.enter_context(RunStatus(folder, world.size, newest, held[0]) if world.is_main else RunStatus())


def note_early_end(folder: Path, ranks: int, newest: Newest, code: int, why: str) -> None:
    """Record a start that ended before it took the lock, if the run folder exists and is not complete."""
    if not folder.is_dir() or (folder / RESULT).exists():
        return
    with suppress(RunLockedError, OSError), hold(folder), RunStatus(folder, ranks, newest) as status:
        status.end(code, why)


class RunStatus:
    """Charge the time of this process to buckets, and keep the status of a run on its rank 0, if a folder is given.

    As a context it ends the attempt on exit: an exception that was not handled inside is a bug.

    Args:
        folder: the run folder, whose lock this process holds, or None to write nothing.
        ranks: number of ranks of this attempt.
        newest: finds the newest checkpoint.
        is_ours: returns whether this process still holds the lock; if not, the process ends.
        since: when the attempt began, in seconds since 1970; None means when this process or its job did.
    """

    def __init__(
        self,
        folder: Path | None = None,
        ranks: int = 1,
        newest: Newest = lambda _folder: None,
        is_ours: Callable[[], bool] = lambda: True,
        since: float | None = None,
    ) -> None:
        self._folder, self._newest, self._is_ours = folder, newest, is_ours
        self._totals: tuple[int | None, int | None] = None, None
        self._tokens: int | None = None
        self._logged: Mapping[str, Any] = {}
        self._saves: list[tuple[int, float]] = []
        self._made: tuple[int, float] | None = None
        self._ended: list[Attempt] = []
        self._before: Status | None = None
        self._save_seconds: float | None = None
        self._has_ended, self._wake = False, threading.Event()
        self._writing, self._warned = threading.Lock(), False
        self.ledger = Ledger()
        if folder is not None:
            self._begin_in(folder, ranks, since)

    def __enter__(self) -> "RunStatus":
        """Return this status."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """End the attempt, unless `end` was called."""
        if isinstance(error, KeyboardInterrupt):
            self.end(INTERRUPTED, "interrupted")
        elif error is not None:
            self.end(CRASHED, f"{type(error).__name__}: {error}")

    def begin(self, step: int, tokens: int, total_steps: int, total_tokens: int) -> None:
        """Record the step from which training starts: later steps of earlier attempts are lost."""
        self._totals = total_steps, total_tokens
        self._stand_at(step, tokens, [(step, 0.0)])

    def went_back(self, step: int, tokens: int) -> None:
        """Record that training goes back to an earlier step: later ones are lost. No step may be in progress."""
        points = [*self._saves, *([self._made] if self._made else [])]
        kept = seconds_until(points, step)
        self.ledger.lose(self.ledger.spent("steps") - kept)
        self._stand_at(step, tokens, [*(point for point in self._saves if point[0] < step), (step, kept)])

    def _stand_at(self, step: int, tokens: int, saves: list[tuple[int, float]]) -> None:
        """Set the current step, whose time is the last of `saves`; later steps of earlier attempts are lost."""
        self._saves, self._made, self._tokens = saves, saves[-1], tokens
        settled = [attempt.without_steps_after(step) for attempt in self._ended]
        if settled != self._ended and self._folder is not None:
            self._ended = settled
            self._try_to(lambda folder: write_attempts(folder, settled))

    def enter(self, bucket: Bucket) -> None:
        """Charge the time from now on to a bucket."""
        changes = DOING[bucket] != DOING[self.ledger.bucket]
        self.ledger.enter(bucket)
        if bucket == "checkpoint" and self._made is not None and self._saves and self._made[0] > self._saves[-1][0]:
            point = self._made[0], self.ledger.spent("steps")
            self._saves = [self._saves[0], *self._saves[1:][-POINTS:], point]
        if changes:
            self._wake.set()

    def reached(self, step: int, tokens: int) -> None:
        """Record the number of completed steps."""
        self._made, self._tokens = (step, self.ledger.spent("steps")), tokens

    def logged(self, record: Mapping[str, Any]) -> None:
        """Record loss and speed from a line of metrics.jsonl."""
        self._logged = record

    @property
    def step(self) -> int:
        """Return the number of completed steps of the run; 0 before training begins."""
        return 0 if self._made is None else self._made[0]

    @property
    def save_seconds(self) -> float:
        """Return how long the last save of this or the previous attempt took; 0 before the first."""
        return self._save_seconds or 0.0

    def saved(self, seconds: float) -> None:
        """Record how long writing the last checkpoint took."""
        self._save_seconds = seconds

    def end(self, code: int, why: str) -> int:
        """Record how the attempt ends; only the first call counts. Returns its exit code."""
        if self._writing.acquire(timeout=PATIENCE):  # a hanging disk must not keep the process alive
            try:
                self._end(code, why)
            finally:
                self._writing.release()
        return code

    def _end(self, code: int, why: str) -> None:
        if self._folder is None or self._has_ended:
            return
        in_one_line = " ".join(why.split())[:WHY_LENGTH]
        self._attempt = replace(self._so_far(), exit_code=code, why=in_one_line)
        self._has_ended = True
        self._wake.set()
        before = self._before
        if before is not None and self._attempt.was_refused and self._was_complete:
            self._try_to(lambda folder: write_json(folder / STATUS, before.to_json()))  # the attempt did nothing
            return
        self._try_to(self._write_status)
        self._try_to(lambda folder: write_attempts(folder, [*self._ended, self._attempt]))

    @property
    def _was_complete(self) -> bool:
        """Return whether the run was complete when this attempt began."""
        return bool(self._ended) and that_counts(self._ended).exit_code == COMPLETE

    def _begin_in(self, folder: Path, ranks: int, since: float | None) -> None:
        """Close the previous attempt if it was killed, begin a new one, and start writing it."""
        launched, job = (launch.process_start(), launch.job_times()) if since is None else (since, None)
        start = launched if job is None else min(launched, job.started)
        queued = start if job is None else min(start, job.submitted)
        self._ended, self._before = _close_before(folder, until=start)
        self._save_seconds = None if self._before is None else self._before.save_seconds
        if self._ended:
            end = self._ended[-1].end
            queued = max(queued, end) if self._was_complete else end  # a complete run was not waiting
            start = max(start, end)
        start = round(start, 3)
        queued = min(queued, start)
        # This host's clock may be behind that of the previous attempt
        self.ledger = Ledger(age=max(0.0, time.time() - start), queue=start - queued)
        self._attempt = Attempt(
            queued=queued,
            start=start,
            end=start,
            host=socket.gethostname(),
            pid=os.getpid(),
            slurm_job_id=launch.job_id(),
            slurm_restart_count=launch.restart_count(),
            ranks=ranks,
            first_step=None,
            last_step=None,
            exit_code=None,
            why=None,
            seconds={},
            progress=(),
        )
        self._write()
        threading.Thread(target=self._keep_written, daemon=True).start()

    def _keep_written(self) -> None:
        while not self._has_ended:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            if not self._is_ours():
                LOG.error(
                    f"{self._folder}: another attempt has put its lock in the place of this one's, which ends here"
                )
                os._exit(UNREACHED)
            self._write()
            time.sleep(PAUSE)

    def _write(self) -> None:
        with self._writing:
            if not self._has_ended:  # after that another process may hold the lock
                self._try_to(self._write_status)

    def _write_status(self, folder: Path) -> None:
        write_json(folder / STATUS, self._document(folder).to_json())

    def _try_to(self, write: Callable[[Path], None]) -> None:
        """Write to the run folder; warn of the first failure after a success."""
        assert self._folder is not None
        try:
            write(self._folder)
        except OSError as error:
            if not self._warned:
                LOG.warning(f"the status of this run cannot be written ({error}); training goes on")
            self._warned = True
        else:
            self._warned = False

    def _document(self, folder: Path) -> Status:
        attempt = self._attempt if self._has_ended else self._so_far()
        ended = [*self._ended, attempt]
        state = state_after(that_counts(ended).exit_code) if self._has_ended else DOING[self.ledger.bucket]
        total_steps, total_tokens = self._totals
        found = Status(
            state=state,
            step=attempt.last_step,
            total_steps=total_steps,
            tokens=self._tokens,
            total_tokens=total_tokens,
            loss=self._logged.get("loss"),
            tokens_per_second=self._logged.get("tokens_per_second"),
            checkpoint=self._newest(folder),
            save_seconds=self._save_seconds,
            starts=len(ended),
            updated=attempt.end,
            attempt=attempt,
        )
        if self._before is None or self._made is not None:
            return found
        kept = (*REACHED, *ASKED) if self._has_ended else REACHED
        return replace(found, **{name: getattr(self._before, name) for name in kept})

    def _so_far(self) -> Attempt:
        """Return the current attempt up to now."""
        made, saves, seconds = self._made, self._saves, self.ledger.read()
        later = made is not None and made[0] > saves[-1][0]
        return replace(
            self._attempt,
            end=self._attempt.queued + sum(seconds.values()),
            first_step=saves[0][0] if saves else None,
            last_step=None if made is None else made[0],
            seconds=seconds,
            progress=tuple([*saves, made] if made is not None and later else saves),
        )


def _close_before(folder: Path, until: float) -> tuple[list[Attempt], Status | None]:
    """Return the previous attempts, and the status of the last one.

    If the last one was killed, it is closed and recorded here.
    """
    for name in (STATUS, ATTEMPTS):
        remove_leftovers(folder / name)
    status, ended = _read_or_put_aside(folder, STATUS, read_status), _read_or_put_aside(folder, ATTEMPTS, read_attempts)
    closed = with_last(ended or [], None if status is None else status.attempt, until)
    if closed != ended:
        try:
            write_attempts(folder, closed)
        except OSError as error:
            LOG.warning(f"the end of the attempt before is not noted: {error}")
    return closed, status


def _read_or_put_aside(folder: Path, name: str, read: Callable[[Path], T]) -> T | None:
    """Return the contents of a file in the folder.

    One that is damaged, or that the disk cannot read at the moment, is renamed, so that the next write keeps it.
    """
    try:
        return read(folder)
    except (OSError, ValueError) as error:
        kept = ""
        if isinstance(error, ValueError) or error.errno in AWAY:
            kept = f"; kept as {name}.damaged"
            with suppress(OSError):
                (folder / name).replace(folder / f"{name}.damaged")
        LOG.warning(f"earlier attempts of this run are not accounted for: {error}{kept}")
        return None
