"""The doctor as a step of a real job: it sees the cluster's settings, and names a node that none of its ranks is on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

SCRIPT = Path(__file__).resolve().parents[2] / "launcher" / "doctor.py"


def examined(
    cluster: Cluster, config: Path, limit: int, *before: str
) -> tuple[set[tuple[str, str, str]], dict[str, Any]]:
    """Run the doctor on both nodes; returns level, node and check of what is not fine, and the whole document."""
    python = cluster.environment["PLUMBLINE_PYTHON"]
    srun = ("srun", "--nodes=2", "--ntasks=2")
    words: tuple[str | Path, ...] = (
        *srun,
        *before,
        python,
        SCRIPT,
        "--config",
        config,
        "--json",
        "--limit",
        str(limit),
    )
    document = json.loads(cluster.run(*words, check=False))
    found = {(one["level"], one["node"], one["check"]) for one in document["findings"] if one["level"] != "ok"}
    return found, document


def test_both_nodes_are_examined_and_an_empty_one_is_named(cluster: Cluster, config: Path) -> None:
    found, document = examined(cluster, config, 60)
    assert found == {("warning", "all", "slurm")}, document
    slurm = document["measured"]["slurm"]
    assert [report["node"] for report in slurm] == ["n1", "n2"]
    assert slurm[0]["configuration"]["KillWait"] == "2 sec"
    assert slurm[0]["job"]["Requeue"] in ("0", "1")
    assert any("KillWait = 2 s: " in finding["text"] for finding in document["findings"])

    absent = '[ "$SLURM_PROCID" = 1 ] || exec "$@"'
    found, document = examined(cluster, config, 3, "bash", "-c", absent, "bash")
    assert found == {("bad", "n2", "arrival")}, document
    assert "rank(s) 1 did not arrive" in document["findings"][0]["text"]
