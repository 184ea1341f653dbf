"""Determine the state of a run from its files, its lock, its checkpoints and the queue, without importing torch."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.checkpoint.newest import newest_checkpoint
from plumbline.launcher.runtime.cluster.slurm_queue import QueuedJob
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.run.interventions import Intervention, read_interventions
from plumbline.launcher.runtime.run.ledger import Attempt, as_text, goodput, total
from plumbline.launcher.runtime.run.lock import LOCK, owner_of
from plumbline.launcher.runtime.run.status_file import (
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
)
from plumbline.launcher.runtime.system.exit_codes import COMPLETE, REQUEUE, STATES

QUIET = 12 * INTERVAL  # seconds after which a run that writes nothing is remarked, or, seen from another host, is dead
SUBMITTED = "slurm"
TRACES = (STATUS, CONFIG, SUBMITTED, LOCK)
"""Files of which every run folder has at least one."""


@dataclass(frozen=True)
class Standing:
    """Describe the state of a run."""

    folder: Path
    state: str
    """As in status.json, or one that only an inspection can tell: queued, dead, unknown, unreadable."""
    why: str | None
    """How it ended, what it waits for, or since when it has been silent."""
    status: Status | None
    """The status as last written."""
    checkpoint: SavedCheckpoint | None
    attempts: tuple[Attempt, ...]
    """Attempts, with the steps that a resume has to repeat counted as lost."""
    interventions: tuple[Intervention, ...]
    """Interventions in the run."""
    seen: float
    """Time of the inspection."""

    @property
    def eta(self) -> float | None:
        """Return the seconds until the last step at the last logged speed, or None if it is not training."""
        found = self.status
        if found is None or self.state not in ("training", "saving", "evaluating") or not found.tokens_per_second:
            return None
        if found.total_tokens is None or found.tokens is None:
            return None
        return (found.total_tokens - found.tokens) / found.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the object of `status.py --json`."""
        found = None if self.status is None else self.status.to_json()
        saved = self.checkpoint
        seconds = total(self.attempts)
        return {
            "run": str(self.folder),
            "state": self.state,
            "why": self.why,
            "eta_seconds": self.eta,
            "checkpoint": None if saved is None else {"step": saved.step, "time": as_text(saved.time)},
            "starts": len(self.attempts),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "goodput": goodput(seconds),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "status": found,
            "interventions": [asdict(made) for made in self.interventions],
        }


def is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run, even one that is only submitted or not readable by this user."""
    try:
        if (folder / "runs").is_dir():  # a sweep, which has a lock, too
            return False
        return folder.is_dir() and any((folder / name).exists() for name in TRACES)
    except PermissionError:
        return True


def runs_of(folder: Path) -> list[Path]:
    """Return the runs of a folder: itself if it is a run, else the runs in it or those of a sweep.

    Raises:
        ValueError: no run was ever started there.
    """
    cells = folder / "runs"
    try:
        root = cells if cells.is_dir() else folder
    except PermissionError:  # what it is cannot be told, and must not hide the others that were asked for
        return [folder]
    if root == folder and is_run(folder):
        return [folder]
    found = sorted(filter(is_run, root.iterdir() if root.is_dir() else ()))  # glob takes a closed folder for empty
    if not found:
        raise ValueError(f"{folder.resolve()}: no run was ever begun there; give the folder of a run or of a sweep")
    return found


def look(folder: Path, jobs: Sequence[QueuedJob]) -> Standing:
    """Inspect a run folder without changing anything.

    Args:
        folder: the run folder.
        jobs: the user's jobs in Slurm's queue.
    """
    now, saved = time.time(), None
    try:
        saved = newest_checkpoint(folder)
        status, ended = read_status(folder), read_attempts(folder)
        done = tuple(read_interventions(folder))
    except (OSError, ValueError) as error:
        return Standing(folder, "unreadable", str(error), None, saved, (), (), now)
    last = None if status is None else status.attempt
    try:
        owner, sees_lock = owner_of(folder), True
    except OSError:
        owner, sees_lock = None, False
    if status is not None and _is_at_work(status, ended, owner, sees_lock, now):
        attempts = [*ended, status.attempt]
        why = f"no update since {as_text(status.updated)}" if now - status.updated > QUIET else None
        return Standing(folder, status.state, why, status, saved, tuple(attempts), done, now)
    attempts = with_last(ended, last, now)
    code = that_counts(attempts).exit_code if attempts else None
    if code != COMPLETE and _has_result(folder, status):  # killed between writing its result and its final status
        return Standing(folder, STATES[COMPLETE], None, status, saved, tuple(attempts), done, now)
    if code != COMPLETE:
        attempts = [attempt.without_steps_after(0 if saved is None else saved.step) for attempt in attempts]
    state, why = _state(folder, attempts)
    if owner is not None:
        state, why = "starting", None
    elif code != COMPLETE and (job := _job_of(folder, last, jobs)) is not None:
        state, why = ("queued", f"job {job.id}: {job.reason}") if job.started is None else ("starting", f"job {job.id}")
    return Standing(folder, state, why, status, saved, tuple(attempts), done, now)


def _has_result(folder: Path, status: Status | None) -> bool:
    """Return whether the last requested step of a run is scored."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return status is not None and bool(result["step"] == status.total_steps)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _is_at_work(
    status: Status, ended: Sequence[Attempt], owner: dict[str, Any] | None, sees_lock: bool, now: float
) -> bool:
    """Return whether the newest attempt is alive: it holds the lock, or wrote recently if locks are not visible."""
    attempt = status.attempt
    if attempt.exit_code is not None or (ended and ended[-1].is_of(attempt)):
        return False
    if owner is not None:
        return (owner.get("host"), owner.get("pid")) == (attempt.host, attempt.pid)
    is_here = sees_lock and attempt.host == socket.gethostname()
    return not is_here and now - status.updated < QUIET


def _state(folder: Path, attempts: Sequence[Attempt]) -> tuple[str, str | None]:
    """Return the state of a run on which no process is working, and why."""
    if not attempts:  # an older run, a cell of a sweep, or one that was only submitted
        return (STATES[COMPLETE] if (folder / RESULT).exists() else "unknown"), None
    counts, last = that_counts(attempts), attempts[-1]
    refused = "" if counts is last else f"; started again and refused: {last.why} (exit code {last.exit_code})"
    if counts.exit_code is None:
        return "dead", f"{counts.why}, after {as_text(counts.end)}{refused}"
    if counts.exit_code == COMPLETE and not (folder / RESULT).exists():
        return STATES[REQUEUE], f"it was complete, and {RESULT} is gone: the same command trains on"
    return state_after(counts.exit_code), f"{counts.why} (exit code {counts.exit_code}){refused}"


def _job_of(folder: Path, last: Attempt | None, jobs: Sequence[QueuedJob]) -> QueuedJob | None:
    """Return the job about to continue a run: that of its newest attempt, or one submitted under its name."""
    mine, ended = (None, 0.0) if last is None else (last.slurm_job_id, last.end)
    named = (folder / SUBMITTED).is_dir()
    its = (job for job in jobs if job.id == mine or (named and job.name == folder.resolve().name))
    # One that was running when the attempt ended may be a shell, or about to end
    return next((job for job in its if job.started is None or job.started > ended), None)
