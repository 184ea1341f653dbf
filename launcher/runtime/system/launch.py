"""Say when this process was launched, and when Slurm took its job and gave it nodes."""

import os
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from plumbline.launcher.runtime.system.nodes import job_fields

ASK_SECONDS = 10.0  # a controller that is busy for longer must not hold up a start


@dataclass(frozen=True)
class JobTimes:
    """Say when Slurm took a job and gave it nodes, seconds since 1970."""

    submitted: float
    started: float


def process_start() -> float:
    """Return when the kernel made this process, seconds since 1970, by a clock that nobody sets."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def job_id() -> str | None:
    """Return the Slurm job of this process."""
    return os.environ.get("SLURM_JOB_ID")


def restart_count() -> int | None:
    """Return how often the Slurm job of this process was requeued; None outside of Slurm."""
    return None if job_id() is None else int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def job_times() -> JobTimes | None:
    """Return the times of the batch job whose first step this process is; None if it is none, or Slurm is silent.

    Of a later step, and of a shell that holds an allocation, the time before was somebody else's.
    """
    job = job_id()
    if job is None or os.environ.get("SLURM_STEP_ID") != "0":
        return None
    try:
        fields = job_fields(job, ASK_SECONDS)
        times = [datetime.fromisoformat(fields[name]).timestamp() for name in ("SubmitTime", "StartTime")]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):  # no scontrol, no answer, another format
        return None
    return JobTimes(*times) if fields.get("BatchFlag") == "1" else None
