"""Read and write a run's status.json, and attempts.jsonl with a line for each attempt that ended.

Rank 0 replaces status.json every few seconds, so for a killed attempt it has the sums up to the last seconds. Nothing
here imports torch.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plumbline.data.disk import is_there
from plumbline.launcher.runtime.cluster import launch
from plumbline.launcher.runtime.run.ledger import Attempt, as_text, as_time
from plumbline.launcher.runtime.run.lock import RunLockedError, hold
from plumbline.launcher.runtime.system.exit_codes import STATES
from plumbline.launcher.runtime.system.files import finite, read_json_lines, write_json, write_json_lines
from plumbline.launcher.runtime.system.log import LOG

STATUS, ATTEMPTS = "status.json", "attempts.jsonl"
RESULT = "result.json"
"""File with the final scores, which exists when the run is complete."""
INTERVAL = 5.0  # seconds between two writes while nothing happens
SILENT = "ended without a word: killed, its node failed, or nothing could be written"


@dataclass(frozen=True)
class SavedCheckpoint:
    """Name a checkpoint."""

    step: int
    time: float
    """When it was written."""


@dataclass(frozen=True)
class Status:
    """Describe the state of a run when this was written."""

    state: str
    """One of starting, training, saving, evaluating or ending; or complete, stopped, diverged, hung or failed."""
    step: int | None
    total_steps: int | None
    tokens: int | None
    total_tokens: int | None
    loss: float | None
    """Loss of the last logged step, or None if there is none or it is not finite."""
    tokens_per_second: float | None
    checkpoint: SavedCheckpoint | None
    """Newest checkpoint."""
    save_seconds: float | None
    """How long writing the last checkpoint of this or the previous attempt took."""
    starts: int
    updated: float
    attempt: Attempt
    """Newest attempt."""

    def to_json(self) -> dict[str, Any]:
        """Return the document of status.json."""
        saved = (
            None if self.checkpoint is None else {"step": self.checkpoint.step, "time": as_text(self.checkpoint.time)}
        )
        values = {
            **asdict(self),
            "checkpoint": saved,
            "updated": as_text(self.updated),
            "attempt": self.attempt.to_json(),
        }
        document: dict[str, Any] = finite(values)
        return document

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> "Status":
        """Return the status from a document.

        Raises:
            ValueError: a key is missing or has an invalid value.
        """
        try:
            values = {field.name: item[field.name] for field in fields(cls)}
            saved = values["checkpoint"]
            values["checkpoint"] = None if saved is None else SavedCheckpoint(saved["step"], as_time(saved["time"]))
            values["updated"] = as_time(values["updated"])
            for field in fields(cls):
                value, is_number = values[field.name], field.type in (int | None, float | None)
                if is_number and not isinstance(value, int | float | None):
                    raise ValueError(f"{field.name} = {value!r}: a number is expected")
        except (KeyError, TypeError) as error:
            raise ValueError(f"no status of a run: {type(error).__name__} {error}") from error
        return cls(**{**values, "attempt": Attempt.from_json(values["attempt"])})


def read_status(folder: Path) -> Status | None:
    """Return the status of a run as last written, or None if there is none.

    Raises:
        ValueError: the file is damaged or has another version; names it.
        OSError: it cannot be read.
    """
    path = folder / STATUS
    if not is_there(path):
        return None
    try:
        return Status.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; remove it") from error


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of a run whose end was recorded.

    Raises:
        ValueError: the file is damaged or has another version; names it.
        OSError: it cannot be read.
    """
    path = folder / ATTEMPTS
    if not is_there(path):
        return []
    try:
        return [Attempt.from_json(item) for _, item in read_json_lines(path)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it") from error


def write_attempts(folder: Path, attempts: Sequence[Attempt]) -> None:
    """Write the attempts that ended."""
    write_json_lines(folder / ATTEMPTS, [attempt.to_json() for attempt in attempts])


def with_last(ended: Sequence[Attempt], last: Attempt | None, until: float) -> list[Attempt]:
    """Return all attempts of a run on which no process is working, with the last one closed if it was killed.

    The time of its death is only known to be before its next write would have been due; its work until then is lost.

    Args:
        ended: attempts whose end was recorded.
        last: the attempt in status.json.
        until: a time when it was dead for certain.
    """
    if last is None or (ended and ended[-1].is_of(last)):
        return [*ended]
    if last.exit_code is None:
        last = replace(last.extended(min(until, last.end + INTERVAL), "lost"), why=SILENT)
    return [*ended, last]


def told_by_rank_0(folder: Path) -> int | None:
    """Return the exit code that rank 0 recorded for this attempt of a Slurm job, or None if it recorded none.

    If rank 0 alone refuses, srun does not return its code: the other ranks wait for it, and are killed.
    """
    with suppress(ValueError, OSError):
        status = read_status(folder)
        if status is not None and _is_of_this_job(status.attempt):
            return status.attempt.exit_code
    return None


def _is_of_this_job(attempt: Attempt) -> bool:
    return (attempt.slurm_job_id, attempt.slurm_restart_count) == (launch.job_id(), launch.restart_count())


def note_end_of_job(folder: Path, code: int) -> None:
    """Charge the time until now to the attempt of the Slurm job that this process ends, which waited for its ranks.

    If the attempt's rank 0 was killed, that time is lost, and `code` is its exit code. Nothing is done, at most with a
    warning, if the last attempt was another one, a process is at work, or the files are unusable: the job has to end.
    """
    if not (folder / STATUS).exists():
        return
    try:
        with suppress(RunLockedError), hold(folder):
            _note_end_of_job(folder, code)
    except (OSError, ValueError) as error:
        LOG.warning(f"the end of this attempt is not accounted for: {error}")


def _note_end_of_job(folder: Path, code: int) -> None:
    status, ended, now = read_status(folder), read_attempts(folder), time.time()
    if status is None:
        return
    last = ended.pop() if ended and ended[-1].is_of(status.attempt) else status.attempt
    if not _is_of_this_job(last):
        return
    if last.exit_code is None:
        last = replace(last.extended(now, "lost"), exit_code=code, why=SILENT)
    else:
        last = last.extended(now, "shutdown")
    write_attempts(folder, [*ended, last])
    state = state_after(that_counts([*ended, last]).exit_code)
    write_json(folder / STATUS, replace(status, state=state, attempt=last, updated=now).to_json())


def that_counts(attempts: Sequence[Attempt]) -> Attempt:
    """Return the attempt that determines a run's state: the newest that was not refused, or the newest if all were.

    Args:
        attempts: of the run, at least one; none of them is running.
    """
    return next((attempt for attempt in reversed(attempts) if not attempt.was_refused), attempts[-1])


def state_after(code: int | None) -> str:
    """Return the state of a run that ended with an exit code, or with an unknown one if None."""
    return "failed" if code is None else STATES.get(code, "failed")
