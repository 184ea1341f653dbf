"""Real pretraining on the two-node cluster: an interrupted, requeued job ends where an uninterrupted one does.

The three jobs run at the same time: two of the same configuration, of which one is stopped halfway, and one that is
submitted by hand with a configuration that does not exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]


def test_an_interrupted_job_ends_with_the_losses_of_an_uninterrupted_one(cluster: Cluster, config: Path) -> None:
    wrong = cluster.run("sbatch", "--parsable", "--nodes=2", *by_hand("--config", "nowhere.yaml"), cwd=config.parent)
    whole, stopped = (submit(cluster, config, name) for name in ("whole", "stopped"))
    runs = config.parent / "runs"

    cluster.wait_for(stopped, lambda _: len(losses(runs / "stopped")) >= 5)
    cluster.run("scancel", "--signal=USR1", stopped)
    cluster.wait_for(stopped, lambda job: job["Restarts"] == "1")
    saved = len(losses(runs / "stopped"))
    assert 5 <= saved < 100
    assert (runs / "stopped" / "checkpoints" / f"step_{saved:08d}" / "manifest.json").exists()

    jobs = [cluster.wait_end(job_id) for job_id in (whole, stopped, wrong)]
    facts = [(job["JobState"], job["ExitCode"], job["Restarts"]) for job in jobs]
    logs = [Path(job["StdOut"]).read_text() for job in jobs]
    assert facts == [("COMPLETED", "0:0", "0"), ("COMPLETED", "0:0", "1"), ("FAILED", "2:0", "0")], "\n".join(logs)
    assert f"resuming after step {saved}" in logs[1]
    assert "nowhere.yaml: no such file" in logs[2]

    assert losses(runs / "stopped") == losses(runs / "whole")
    assert list(losses(runs / "whole")) == list(range(1, 101))
    results = [json.loads((runs / name / "result.json").read_text()) for name in ("whole", "stopped")]
    assert results[0] == results[1]


def submit(cluster: Cluster, config: Path, name: str) -> str:
    """Queue a run of one rank on each node; returns the job id."""
    command = (cluster.environment["PLUMBLINE_PYTHON"], REPOSITORY / "launcher" / "submit.py", "--json")
    options = ("--config", config, "--nodes", "2", "--tasks-per-node", "1", f"run.name={name}")
    facts: dict[str, Any] = json.loads(cluster.run(*command, *options))
    return str(facts["job_id"])


def by_hand(*arguments: str) -> tuple[str, ...]:
    """Return the job script and its arguments, as a person would type them."""
    return (str(REPOSITORY / "slurm" / "pretrain.sbatch"), *arguments)


def losses(run: Path) -> dict[int, float]:
    """Loss of each logged step, in the order of the log; steps that were logged twice are an error."""
    file = run / "metrics.jsonl"
    whole_lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    lines = [json.loads(line) for line in whole_lines]
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(dict(steps)) == len(steps), f"{file}: a step is there twice"
    return dict(steps)
