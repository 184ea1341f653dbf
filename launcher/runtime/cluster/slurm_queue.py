"""List this user's jobs in Slurm's queue, if there is one."""

import subprocess
from dataclasses import dataclass
from datetime import datetime

ASK_SECONDS = 10.0


@dataclass(frozen=True)
class QueuedJob:
    """Describe a job that waits or runs."""

    id: str
    started: float | None
    """When its nodes were given to it, in seconds since 1970, or None if it waits."""
    reason: str
    """Slurm's name for what it waits for: Priority, BeginTime, Dependency, ..."""
    name: str


def queued_jobs() -> list[QueuedJob]:
    """Return the jobs that wait or run, or none if there is no squeue or it does not answer."""
    command = ("squeue", "--me", "--noheader", "--states=PENDING,CONFIGURING,RUNNING", "--format=%A|%T|%S|%r|%j")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines():
        if line.count("|") >= 4:
            number, state, start, reason, name = line.split("|", 4)
            found.append(QueuedJob(number, None if state == "PENDING" else _as_time(start), reason, name))
    return found


def _as_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A
        return 0.0
