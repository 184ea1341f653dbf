"""A real rank that gets half of its time is named, with its host, after two windows."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from plumbline.launcher.runtime.system.exit_codes import REQUEUE
from plumbline.launcher.runtime.train.stragglers import STEPS, TOLERANCE, WINDOWS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Job, Run, Start

ENDLESS = ["train.steps=50000", "train.eval_interval=null", "checkpoint.interval=null"]


def windows(run: Run) -> dict[int, float]:
    return run.column("rank_skew")


def stop(job: Job) -> str:
    """Ask the ranks to stop, and return their warnings about slow ones."""
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    outcome = job.wait()
    assert outcome.code == REQUEUE, outcome.stderr
    return "\n".join(line for line in outcome.stderr.splitlines() if "holds the others up" in line)


def test_a_rank_that_is_held_up_is_named_with_its_host(start_pretrain: Start, tiny_config: Path) -> None:
    job = start_pretrain(tiny_config, "straggler", ENDLESS, ranks=2)
    job.wait_until(lambda: job.run.column("loss"))
    over = threading.Event()

    def hold_up() -> None:
        while not over.is_set():
            job.processes[1].send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            job.processes[1].send_signal(signal.SIGCONT)
            time.sleep(0.005)

    holder = threading.Thread(target=hold_up)
    holder.start()
    try:
        job.wait_until(lambda: "holds the others up" in job.texts()[1])
    finally:
        over.set()
        holder.join()
    warning = stop(job)
    assert f"rank 1 on {socket.gethostname()} holds the others up: its device takes " in warning
    assert any(record.get("slow_rank") == 1 for record in job.run.records)
    assert all(step % STEPS == 0 for step in windows(job.run))


def test_equal_ranks_are_named_only_where_the_machine_slows_one_down(start_pretrain: Start, tiny_config: Path) -> None:
    """What the machine does to one of them is in the log: without it there is no warning."""
    job = start_pretrain(tiny_config, "equals", ENDLESS, ranks=2)
    job.wait_until(lambda: len(windows(job.run)) >= 3)
    warnings = stop(job)
    skews = [windows(job.run)[step] for step in sorted(windows(job.run))]
    slow = [skew > 1 + TOLERANCE for skew in skews]
    if not any(all(slow[first : first + WINDOWS]) for first in range(len(slow) - WINDOWS + 1)):
        assert re.findall("its device takes", warnings) == []
