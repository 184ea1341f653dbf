"""A node that dies under three jobs at once, with Slurm's defaults: a run that is trained, and two of the probe.

The daemon of node n2 and all it runs are killed; to Slurm it is up for another five minutes. A third node is spare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Cluster, cluster_of
from tests.slurm.probe import REPOSITORY, decisions, install


@pytest.fixture
def three_nodes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield a cluster of three nodes of its own; the other says whether there is Slurm."""
    with cluster_of("n1", "n2", "n3") as started:
        assert re.search(r"SlurmdTimeout\s+= 300 sec", started.run("scontrol", "show", "config"))
        yield started


def test_jobs_go_on_without_a_dead_node_or_wait_for_it(three_nodes: Cluster, config: Path, tmp_path: Path) -> None:
    probe = install(three_nodes, tmp_path)
    command = (three_nodes.environment["PLUMBLINE_PYTHON"], REPOSITORY / "launcher" / "submit.py", "--json")
    options = ("--config", config, "--nodes", "2", "--tasks-per-node", "1", "checkpoint.interval=10")
    facts: dict[str, Any] = json.loads(three_nodes.run(*command, *options))
    trained = str(facts["job_id"])
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
    assert decisions(log)[0].endswith("back into the queue, without n2")

    assert whole_state == ("COMPLETED", "0:0", "1"), whole_log
    assert "n2 does not answer, but without it there are too few nodes" in decisions(whole_log)[0]

    assert start_state == ("COMPLETED", "0:0", "1"), start_log
    assert "restart 0: 2 ranks on n[1-2]" in start_log
    assert decisions(start_log)[0].startswith("exit code 233, nothing saved after step 0, fruitless attempt 1 of 2")
    assert decisions(start_log)[0].endswith("back into the queue, without n2")
    assert "restart 1: 2 ranks on n[1,3]" in start_log
