"""Keep a run's status and ledger while this process works on it; what others read is in `status_file.py`.

The loop only says what it begins to do. A thread writes, every few seconds and whenever that changes, so that neither a
step nor a slow disk waits for the other. A disk that is full is a warning.
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

from plumbline.launcher.runtime.run.ledger import Attempt, Bucket, Ledger, seconds_until
from plumbline.launcher.runtime.run.lock import LEASE_SECONDS, RunLockedError, hold
from plumbline.launcher.runtime.run.status_file import (
    ATTEMPTS,
    INTERVAL,
    RESULT,
    STATUS,
    Saved,
    Status,
    read_attempts,
    read_status,
    state_after,
    that_counts,
    with_last,
    write_attempts,
)
from plumbline.launcher.runtime.system import launch
from plumbline.launcher.runtime.system.collectives import from_main
from plumbline.launcher.runtime.system.exit_codes import COMPLETE, CRASHED, INTERRUPTED, UNREACHED
from plumbline.launcher.runtime.system.files import remove_leftovers, write_json
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.world import World

DOING: dict[Bucket, str] = {
    "start_up": "starting",
    "compile": "training",
    "steps": "training",
    "data_wait": "training",
    "checkpoint": "saving",
    "evaluation": "evaluating",
    "shutdown": "ending",
}
"""States of a run at work, by what its time is charged to."""
PAUSE = 0.5  # least seconds between two writes
PATIENCE = 5.0  # seconds that the end of an attempt waits for a write that is under way
POINTS = 64  # newest saves whose time is known exactly: no resume goes back further
REACHED = ("step", "tokens", "loss", "tokens_per_second")
"""What a status says of training; a start that never came to it leaves that as it was."""
ASKED = ("total_steps", "total_tokens")
"""How far training is to go; a start that was refused leaves that as well, but one under way may ask for more."""
WHY_LENGTH = 500  # letters of an error that are kept

T = TypeVar("T")
Newest = Callable[[Path], Saved | None]
"""Finds the newest checkpoint in a run folder."""


@contextmanager
def begin_attempt(folder: Path, world: World, newest: Newest) -> Iterator["RunStatus"]:
    """Hold the lock of a run folder on rank 0 and keep the run's status there. All ranks must call.

    Args:
        folder: of the run.
        world: this process among all.
        newest: finds the newest checkpoint.

    Raises:
        RunLockedError: on all ranks: another process holds the lock.
        OSError: on all ranks: the folder cannot be written.
    """
    held: list[Callable[[], bool]] = []
    with ExitStack() as stack:
        from_main(lambda: held.append(stack.enter_context(hold(folder, LEASE_SECONDS, folder / STATUS))), world)
        yield stack.enter_context(RunStatus(folder, world.size, newest, *held) if world.is_main else RunStatus())


def note_refusal(folder: Path, ranks: int, newest: Newest, code: int, error: Exception) -> None:
    """Note a start that was refused before it came to the lock, in a run folder that is there and not complete."""
    if not folder.is_dir() or (folder / RESULT).exists():
        return
    with suppress(RunLockedError, OSError), hold(folder), RunStatus(folder, ranks, newest) as status:
        status.end(code, str(error))


class RunStatus:
    """Charge the time of this process to buckets, and keep the status of a run where one is given, on its rank 0.

    As a context it ends the attempt with what leaves it: an exception that nobody has taken is a bug.

    Args:
        folder: of the run, whose lock this process holds; None: nothing is written.
        ranks: of this attempt.
        newest: finds the newest checkpoint.
        is_ours: says whether the lock is still this process's; where it is not, the process ends.
    """

    def __init__(
        self,
        folder: Path | None = None,
        ranks: int = 1,
        newest: Newest = lambda _folder: None,
        is_ours: Callable[[], bool] = lambda: True,
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
            self._begin_in(folder, ranks)

    def __enter__(self) -> "RunStatus":
        """Return this status."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """End the attempt, if nobody has said how it ends."""
        if error is not None:
            code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else CRASHED
            self.end(code, f"{type(error).__name__}: {error}")

    def begin(self, step: int, tokens: int, total_steps: int, total_tokens: int) -> None:
        """Say after which step training goes on: later ones, which attempts before have made, are lost."""
        self._totals = total_steps, total_tokens
        self._stand_at(step, tokens, [(step, 0.0)])

    def went_back(self, step: int, tokens: int) -> None:
        """Say that training goes on after an earlier step: later ones are lost. No step is being made."""
        points = [*self._saves, *([self._made] if self._made else [])]
        kept = seconds_until(points, step)
        self.ledger.lose(self.ledger.spent("steps") - kept)
        self._stand_at(step, tokens, [*(point for point in self._saves if point[0] < step), (step, kept)])

    def _stand_at(self, step: int, tokens: int, saves: list[tuple[int, float]]) -> None:
        """Stand at a step, known when by the last of `saves`; what attempts before made of later ones is lost."""
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
        """Say how many steps are made."""
        self._made, self._tokens = (step, self.ledger.spent("steps")), tokens

    def logged(self, record: Mapping[str, Any]) -> None:
        """Take loss and speed from a line of metrics.jsonl."""
        self._logged = record

    @property
    def step(self) -> int:
        """Return how many steps of the run are made; 0 before training begins."""
        return 0 if self._made is None else self._made[0]

    @property
    def save_seconds(self) -> float:
        """Return how long the last save took, of this attempt or of the one before; 0 before the first."""
        return self._save_seconds or 0.0

    def saved(self, seconds: float) -> None:
        """Say how long the last checkpoint was being written."""
        self._save_seconds = seconds

    def end(self, code: int, why: str) -> int:
        """Say how the attempt ends; who comes second is not heard. Returns the exit code."""
        if self._writing.acquire(timeout=PATIENCE):  # a disk that hangs must not keep the process from ending
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
            self._try_to(lambda folder: write_json(folder / STATUS, before.to_json()))  # nothing has come of it
            return
        self._try_to(self._write_status)
        self._try_to(lambda folder: write_attempts(folder, [*self._ended, self._attempt]))

    @property
    def _was_complete(self) -> bool:
        """Return whether the run was complete when this attempt began."""
        return bool(self._ended) and that_counts(self._ended).exit_code == COMPLETE

    def _begin_in(self, folder: Path, ranks: int) -> None:
        """Close the attempt before if it was killed, begin a new one, and keep it written."""
        launched, job = launch.process_start(), launch.job_times()
        start = launched if job is None else min(launched, job.started)
        queued = start if job is None else min(start, job.submitted)
        self._ended, self._before = _close_before(folder, until=start)
        self._save_seconds = None if self._before is None else self._before.save_seconds
        if self._ended:
            end = self._ended[-1].end
            queued = max(queued, end) if self._was_complete else end  # a complete run waits for nothing
            start = max(start, end)
        start = round(start, 3)
        queued = min(queued, start)
        # This host's clock may be behind that of the attempt before
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
            if not self._has_ended:  # then the lock may be another's already
                self._try_to(self._write_status)

    def _write_status(self, folder: Path) -> None:
        write_json(folder / STATUS, self._document(folder).to_json())

    def _try_to(self, write: Callable[[Path], None]) -> None:
        """Write to the run folder; warn once of what fails, until something succeeds."""
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
        """Return the attempt until now."""
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
    """Return the attempts before, and the status of the last one.

    If the last one was killed, it is closed here and noted down.
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
    """Return what is in a file of the folder; a damaged one is renamed, or the next write would lose it."""
    try:
        return read(folder)
    except (OSError, ValueError) as error:
        kept = ""
        if isinstance(error, ValueError):
            kept = f"; kept as {name}.damaged"
            with suppress(OSError):
                (folder / name).replace(folder / f"{name}.damaged")
        LOG.warning(f"earlier attempts of this run are not accounted for: {error}{kept}")
        return None
