"""List this user's jobs that wait in Slurm's queue, if there is one."""

import subprocess
from dataclasses import dataclass

ASK_SECONDS = 10.0


@dataclass(frozen=True)
class WaitingJob:
    """Describe a waiting job."""

    id: str
    reason: str
    """Slurm's name for what it waits for: Priority, BeginTime, Dependency, ..."""
    name: str


def waiting_jobs() -> list[WaitingJob]:
    """Return the waiting jobs, or none if there is no squeue or it does not answer."""
    command = ("squeue", "--me", "--noheader", "--states=PENDING", "--format=%A|%r|%j")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [WaitingJob(*line.split("|", 2)) for line in done.stdout.splitlines() if line.count("|") >= 2]
