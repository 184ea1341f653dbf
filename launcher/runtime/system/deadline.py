"""Ask a run to stop when the time limit of its Slurm job is near, also where no signal says so.

Sites forbid `--signal`, people leave it out, and a limit may be lowered while the job runs. So a thread asks Slurm now
and then when the job ends, and raises the same request as a signal would while there is time to make a step and save.
"""

import math
import os
import subprocess
import time
from collections.abc import Callable
from threading import Thread

from plumbline.launcher.runtime.system import nodes
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.signals import StopRequest

NOTICE = "PLUMBLINE_NOTICE"
END = "SLURM_JOB_END_TIME"
LOOK_SECONDS = 1.0
ASK_SECONDS = 180.0  # between questions to the controller, which all jobs of the cluster share
ANSWER_SECONDS = 30.0


def watch_time_limit(stop: StopRequest, is_main: bool) -> None:
    """Watch the time limit of the Slurm job that this process is in, if any; of all ranks, the main one does it.

    Raises:
        ValueError: on all ranks, the notice is no number of seconds.
    """
    notice, job_id = read_notice(), nodes.own_job()
    if job_id is not None and is_main:
        Thread(target=watch, args=(stop, notice, lambda: job_end(job_id)), daemon=True).start()


def read_notice() -> float:
    """Return how many seconds before its time limit a job is to save, unless its saves take longer.

    Raises:
        ValueError: the variable is no whole number.
    """
    text = os.environ.get(NOTICE) or "300"
    if not text.isdigit():
        raise ValueError(f"{NOTICE} is {text}: give the seconds before the time limit at which to save, as in --notice")
    return float(text)


def watch(stop: StopRequest, notice: float, ask: Callable[[], float | None], ask_seconds: float = ASK_SECONDS) -> None:
    """Ask for a stop once less time is left than the notice, or than a stop takes; return then.

    Args:
        stop: knows how long a stop takes, and is asked.
        notice: seconds.
        ask: returns when the job ends, as `job_end` does.
        ask_seconds: between two calls of `ask`.
    """
    # Newer versions of Slurm, and slurm/job.sh, say it at the start: for containers, which have none of its commands
    end = float(os.environ.get(END) or math.inf)
    asked = -math.inf
    while True:
        if time.monotonic() - asked >= ask_seconds:
            end, asked = ask() or end, time.monotonic()
        left = end - time.time()
        if left < max(notice, stop.takes):
            LOG.info(f"time limit in {max(0, int(left)) // 60}:{max(0, int(left)) % 60:02}: saving")
            stop.ask("ahead of the time limit")
            return
        time.sleep(LOOK_SECONDS)


def job_end(job_id: str) -> float | None:
    """Return when Slurm ends a job, in seconds since 1970; infinity without a limit, None where Slurm does not say."""
    command = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%e")
    variables = {**os.environ, "SLURM_TIME_FORMAT": "%s"}  # or it would be local time, of which an hour comes twice
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.strip()
    return float(text) if text.isdigit() else math.inf if text in ("N/A", "NONE", "Unknown") else None
