"""Where the time of a requeued job went adds up to what Slurm says of it, attempt by attempt."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.slurm.test_pretrain_job import losses, named, rank_of

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

RESOLUTION = 1.0
"""Seconds: Slurm's times are whole ones, which for jobs of some seconds is more than anything else that differs."""


def test_the_ledger_of_a_requeued_job_agrees_with_slurm(cluster: Cluster, config: Path) -> None:
    """One job, in three attempts: stopped on request, then its rank 0 killed, then left alone."""
    (job_id,) = cluster.submit(config, *named("ledger"), "checkpoint.interval=150")
    run = config.parent / "runs" / "ledger"
    submitted = moment(cluster.job(job_id)["SubmitTime"])
    cluster.wait_for(job_id, lambda _: len(losses(run)) >= 30)
    cluster.run("scancel", "--signal=USR1", job_id)
    cluster.wait_for(job_id, lambda job: (job["Restarts"], job["JobState"]) == ("1", "PENDING"))
    assert standing(cluster, run)["state"] in ("queued", "starting"), "its old credentials have to expire first"
    stopped = len(losses(run))
    cluster.wait_for(job_id, lambda _: steps_to_lose(run, beyond=stopped + 1) in range(3, 60))
    rank_of(job_id, 0).kill()
    cluster.wait_for(job_id, lambda job: job["Restarts"] == "2")
    assert cluster.wait_end(job_id)["JobState"] == "COMPLETED"

    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["exit_code"] for attempt in attempts] == [85, 137, 0]
    assert [attempt["slurm_restart_count"] for attempt in attempts] == [0, 1, 2]
    assert attempts[0]["last_step"] == attempts[1]["first_step"] == stopped
    assert stopped < attempts[2]["first_step"] < attempts[1]["last_step"]
    assert [attempt["seconds"]["lost"] > 0 for attempt in attempts] == [False, True, False]

    told = told_by_slurm(cluster, job_id)
    assert len(told) == len(attempts)
    before = submitted
    for attempt, (start, end) in zip(attempts, told, strict=True):
        spent = attempt["seconds"]
        print(spent, "Slurm:", start - before, end - start)
        agree(spent["queue"], start - before)
        agree(sum(spent.values()) - spent["queue"], end - start)
        before = end
    whole = sum(sum(attempt["seconds"].values()) for attempt in attempts)
    agree(whole, told[-1][1] - submitted)
    found = standing(cluster, run)
    assert (found["state"], found["starts"]) == ("complete", 3)
    assert sum(found["seconds"].values()) == pytest.approx(whole)
    assert found["goodput"] == pytest.approx(sum(attempt["seconds"]["steps"] for attempt in attempts) / whole)


def steps_to_lose(run: Path, beyond: int) -> int:
    """Return how many steps status.json knows after the newest checkpoint, once that is one of a later step."""
    status = json.loads((run / "status.json").read_text())
    saved = status["checkpoint"]["step"]
    return int(status["step"] or 0) - saved if saved >= beyond else 0


def agree(ours: float, theirs: float) -> None:
    """Compare seconds: within 1 % or 1 s, and what Slurm rounds off."""
    assert abs(ours - theirs) <= max(1.0, 0.01 * theirs) + RESOLUTION, f"{ours} s, by Slurm {theirs} s"


def told_by_slurm(cluster: Cluster, job_id: str) -> list[tuple[float, float]]:
    """Return start and end of each attempt of a job, as Slurm's own log of completed jobs has them."""
    lines = (cluster.folder / "jobcomp.log").read_text().splitlines()
    mine = [line for line in lines if f"JobId={job_id} " in line]
    return [(moment(field(line, "StartTime")), moment(field(line, "EndTime"))) for line in mine]


def field(line: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", line)
    assert found is not None, line
    return found[1]


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def standing(cluster: Cluster, run: Path) -> dict[str, Any]:
    """Return what status.py says of a run."""
    python, script = cluster.environment["PLUMBLINE_PYTHON"], "launcher/status.py"
    found: dict[str, Any] = json.loads(cluster.run(python, script, run, "--json"))["runs"][0]
    return found
