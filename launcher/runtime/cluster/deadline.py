"""Ask a run to stop when the time limit of its Slurm job is near, even without a signal.

Sites forbid `--signal`, people omit it, and a limit may be lowered while the job runs. So a thread regularly asks Slurm
when the job ends, and makes the same request as a signal while there is still time to take a step and save.
"""

import math
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from plumbline.launcher.runtime.cluster import nodes
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.signals import StopRequest

NOTICE = "PLUMBLINE_NOTICE"
END = "SLURM_JOB_END_TIME"
LOOK_SECONDS = 1.0
ASK_SECONDS = 180.0  # between queries to the controller, which all jobs of the cluster share
ANSWER_SECONDS = 30.0


def watch_time_limit(stop: StopRequest, is_main: bool) -> None:
    """Watch the time limit of this process's Slurm job, if any, on the main rank.

    Raises:
        ValueError: on all ranks, if the notice is not a number of seconds.
    """
    notice, job_id = read_notice(), nodes.own_job()
    if job_id is not None and is_main:
        Thread(target=watch, args=(stop, notice, lambda: job_end(job_id)), daemon=True).start()


def read_notice() -> float:
    """Return how many seconds before its time limit a job should save, unless its saves take longer.

    Raises:
        ValueError: the variable is not a whole number.
    """
    text = os.environ.get(NOTICE) or "300"
    if not text.isdecimal():
        raise ValueError(f"{NOTICE} is {text}: give the seconds before the time limit at which to save, as in --notice")
    return float(text)


def watch(stop: StopRequest, notice: float, ask: Callable[[], float | None], ask_seconds: float = ASK_SECONDS) -> None:
    """Request a stop once less time is left than the notice, or than a stop takes, and return.

    Args:
        stop: the stop request, which also knows how long a stop takes.
        notice: seconds.
        ask: returns when the job ends, as `job_end` does.
        ask_seconds: seconds between two calls of `ask`.
    """
    # Newer versions of Slurm and slurm/job.sh set it at the start, for containers, which lack Slurm's commands
    end = math.inf
    with suppress(ValueError):  # of a variable that somebody set to something else: Slurm is asked all the same
        end = float(os.environ.get(END) or math.inf)
    if end < time.time():  # of a job that has ended, in a shell that has not
        end = math.inf
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
    """Return when Slurm ends a job, in seconds since 1970: infinity without a limit, None if Slurm does not answer."""
    command = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%e")
    variables = {**os.environ, "SLURM_TIME_FORMAT": "%s"}  # not local time, in which an hour occurs twice
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.strip()
    return float(text) if text.isdecimal() else math.inf if text in ("N/A", "NONE", "Unknown") else None
