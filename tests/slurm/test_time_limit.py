"""A job that is told nothing saves ahead of its time limit all the same."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plumbline.launcher.runtime.cluster.deadline import job_end
from tests.slurm.probe import SLURM_FOLDER

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster


def test_slurm_says_when_a_job_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setenv("TZ", "America/New_York")
    job_id = cluster.run("sbatch", "--parsable", "--time=60", "--output=/dev/null", "--wrap", "sleep 3600")
    cluster.wait_for(job_id, lambda job: job["JobState"] == "RUNNING")
    begun = job_end(job_id)
    assert begun is not None
    assert begun - 3600 == pytest.approx(time.time(), abs=120)

    cluster.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=10")
    assert job_end(job_id) == begun - 3000, "a limit that was lowered"
    cluster.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=UNLIMITED")
    assert job_end(job_id) == math.inf
    cluster.run("scancel", job_id)
    assert job_end("4000000") is None, "there is no such job"
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    assert job_end(job_id) is None, "there is no controller"
    monkeypatch.setenv("PATH", "/nowhere")
    assert job_end(job_id) is None, "there is no Slurm, as in a container"


def test_a_job_without_a_signal_saves_ahead_of_its_limit(cluster: Cluster, config: Path) -> None:
    """Less time is left than the notice from the first step on, after which one more is made; then there is an hour."""
    cluster = replace(cluster, environment={**cluster.environment, "PLUMBLINE_NOTICE": "299"})
    options = ("--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=5", "--signal=URG@60")
    job = (str(SLURM_FOLDER / "pretrain.sbatch"), "--config", str(config))
    job_id = cluster.run("sbatch", *options, *job, cwd=config.parent)
    cluster.wait_for(job_id, lambda job: job["Restarts"] == "1")
    cluster.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=60")

    ended = cluster.wait_end(job_id)
    log = Path(ended["StdOut"]).read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert log.count("time limit in 4:") == 1, log
    assert log.count("stopped ahead of the time limit; the same command resumes") == 1
    assert "requeue.py: exit code 85, what is saved went from step 0 to step 2: back into the queue" in log
    assert "resuming after step 2" in log
