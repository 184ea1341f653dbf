"""A node that dies, with Slurm's defaults: under three jobs at once, and under one whose ranks have not met yet.

The daemon of node n2 and all it runs are killed; to Slurm it is up for another five minutes. A third node is spare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster, cluster_of
from tests.slurm.probe import decisions, install


@pytest.fixture
def three_nodes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield a cluster of three nodes of its own; the other says whether there is Slurm."""
    with cluster_of("n1", "n2", "n3") as started:
        assert re.search(r"SlurmdTimeout\s+= 300 sec", started.run("scontrol", "show", "config"))
        yield started


def test_a_node_that_is_back_at_once_is_missed_by_the_ranks(three_nodes: Cluster, config: Path, tmp_path: Path) -> None:
    """Neither srun nor Slurm notices: the job has been heard of too lately for the node's return to be a sign."""
    (job_id,) = three_nodes.submit(config, "train.hang_minutes=0.5")
    three_nodes.wait_for(job_id, lambda _: three_nodes.ranks("n2"))
    three_nodes.fail_node("n2")
    three_nodes.start_node("n2")
    job = three_nodes.wait_end(job_id)
    log = Path(job["StdOut"]).read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
    assert "nothing moved for 0.5 minutes while meeting the other ranks (train.hang_minutes): rank 1 wrote noth" in log
    assert json.loads((tmp_path / "runs" / "tiny" / "result.json").read_text())["step"] == 100


def test_jobs_go_on_without_a_dead_node_or_wait_for_it(three_nodes: Cluster, config: Path, tmp_path: Path) -> None:
    probe = install(three_nodes, tmp_path)
    (trained,) = three_nodes.submit(config, "checkpoint.interval=10")
    run = tmp_path / "runs" / "tiny"
    whole = probe.submit("--nodes=3", "--gpus-per-node=2", endings="later 1/0")
    probe.wait_for_ranks(whole, 3)
    three_nodes.wait_for(trained, lambda _: (run / "checkpoints" / "step_00000010").exists())
    three_nodes.fail_node("n2")
    (tmp_path / "now").touch()  # the other ranks of the probe find out
    started_on_it = probe.submit("--nodes=2", endings="0/0")

    for job_id in (trained, whole, started_on_it):
        three_nodes.wait_for(job_id, lambda job: job["Restarts"] == "1")
    three_nodes.start_node("n2")  # or all would wait until Slurm gives it up, SlurmdTimeout after its death
    (state, log), (whole_state, whole_log), (start_state, start_log) = (
        probe.end(job_id) for job_id in (trained, whole, started_on_it)
    )
    assert state == ("COMPLETED", "0:0", "1"), log
    assert "restart 0: 2 ranks on n[1-2]" in log
    assert "restart 1: 2 ranks on n[1,3]" in log
    assert "resuming after step" in log
    assert json.loads((run / "result.json").read_text())["step"] == 100
    assert decisions(log)[0].endswith("back into the queue, without n2 (n2 does not answer)")

    assert whole_state == ("COMPLETED", "0:0", "1"), whole_log
    assert "n2 does not answer, but without it there are too few nodes" in decisions(whole_log)[0]

    assert start_state == ("COMPLETED", "0:0", "1"), start_log
    assert "restart 0: 2 ranks on n[1-2]" in start_log
    assert decisions(start_log)[0].startswith("exit code 233, nothing saved after step 0, fruitless attempt 1 of 2")
    assert decisions(start_log)[0].endswith("back into the queue, without n2 (n2 does not answer)")
    assert "restart 1: 2 ranks on n[1,3]" in start_log
