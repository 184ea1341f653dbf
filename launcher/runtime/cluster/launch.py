"""Find out when this process was launched, and when its Slurm job was submitted and got its nodes."""

import os
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from plumbline.launcher.runtime.cluster.nodes import fields_of, own_job

ASK_SECONDS = 10.0  # a controller that is busy for longer must not delay a start


@dataclass(frozen=True)
class JobTimes:
    """Hold when a job was submitted and when it got its nodes, in seconds since 1970."""

    submitted: float
    started: float


def process_start() -> float:
    """Return when the kernel created this process, in seconds since 1970, unaffected by changes of the clock."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def job_id() -> str | None:
    """Return the id of this process's Slurm job, or None outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID")


def restart_count() -> int | None:
    """Return how often this process's Slurm job was requeued, or None outside of Slurm."""
    if job_id() is None:
        return None
    text = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def job_times() -> JobTimes | None:
    """Return the times of the batch job whose first step this process is, or None if it is not or Slurm is silent.

    Before a later step, or in a shell that holds an allocation, the time was spent on other work.
    """
    job = own_job()
    if job is None or os.environ.get("SLURM_STEP_ID") != "0":
        return None
    try:
        fields = fields_of("job", job, ASK_SECONDS)
        times = [datetime.fromisoformat(fields[name]).timestamp() for name in ("SubmitTime", "StartTime")]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):  # no scontrol, no answer, another format
        return None
    return JobTimes(*times) if fields.get("BatchFlag") == "1" else None
