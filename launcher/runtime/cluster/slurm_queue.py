"""List this user's jobs in Slurm's queue, if there is one, and tell which of them waits for ever."""

import subprocess
from dataclasses import dataclass
from datetime import datetime

from plumbline.launcher.runtime.cluster.nodes import fields_of

ASK_SECONDS = 10.0
PARTITION_LIMITS = ("PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit")
"""Reasons of a job above a limit of its partition: the first at once, the others once Slurm has tried to start it."""


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


def why_never(job_id: str) -> str | None:
    """Return why a job that Slurm has taken will never start, or None if it may.

    Unless a site sets EnforcePartLimits, Slurm takes a job that is above what its partition, account or QOS allows one
    job, and lets it wait.
    """
    try:
        job = fields_of("job", job_id, ASK_SECONDS)
        reason, partition = job["Reason"], job["Partition"]
        if reason not in PARTITION_LIMITS and "PerJob" not in reason:  # of an account or a QOS
            return None
        if "," in partition:  # the reason may be that of one partition, which leaves the others
            return None
        asked = f"it asks for {job['TimeLimit']} on {job['NumNodes'].partition('-')[0]} node(s)"
        limits = fields_of("partition", partition, ASK_SECONDS)
        most = ", ".join(f"{name} {limits[name]}" for name in ("MaxTime", "MaxNodes", "TotalNodes"))
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):  # no scontrol, no answer, another format
        return None
    return f"{reason}: {asked}; partition {partition} has {most}"


def _as_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A
        return 0.0
