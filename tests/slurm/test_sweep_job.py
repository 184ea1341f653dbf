"""A sweep as a real job array on the two-node cluster: one of two tasks is stopped halfway, requeued, and finishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 500  # so many that a task is still training when it is stopped
SETTINGS: dict[str, Any] = {
    "train.steps": STEPS,
    "checkpoint.interval": None,
    "metrics.trackers": [],
    "metrics.peak_tflops": 0.1,
}


def test_an_array_shares_the_runs_survives_a_stop_and_leaves_the_summary(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "sweep.yaml"
    grids = [{"axes": {"optimizer.lr": [0.002, 0.004]}}]
    sweep = {"name": "array", "root": str(tmp_path), "base": str(config), "seeds": [1, 2], "grids": grids}
    file.write_text(yaml.safe_dump({**sweep, "set": SETTINGS}))
    command = (cluster.environment["PLUMBLINE_PYTHON"], REPOSITORY / "launcher" / "sweep.py", "--config", file)
    options = ("--slurm", "--tasks", "2", "--cpus-per-task", "1", "--time", "1:00:00", "--json")
    facts: dict[str, Any] = json.loads(cluster.run(*command, *options))
    assert facts["runs"] == 4
    file.write_text("edited while the job waits in the queue")
    tasks = [f"{facts['job_id']}_{number}" for number in range(2)]

    folder = tmp_path / "array"
    cluster.wait_for(tasks[0], lambda _: len(begun(folder)) >= 2)
    cluster.run("scancel", "--signal=USR1", tasks[0])
    cluster.wait_for(tasks[0], lambda job: job["Restarts"] == "1")

    jobs = [cluster.wait_end(task) for task in tasks]
    logs = [Path(job["StdOut"]).read_text() for job in jobs]
    ends = [(job["JobState"], job["ExitCode"], job["Restarts"]) for job in jobs]
    assert ends == [("COMPLETED", "0:0", "1"), ("COMPLETED", "0:0", "0")], "\n".join(logs)
    assert all(f"of 2 (share {number} of 2)" in log for number, log in enumerate(logs))
    resumed = [path for path in (folder / "runs").glob("*/log.txt") if "resuming after step" in path.read_text()]
    assert len(resumed) == 1, "the run that was stopped went on from its checkpoint"

    assert json.loads((folder / "summary.json").read_text())["runs"] == {"finished": 4}
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(row["lr"], row["seed"]) for row in rows] == [(0.002, 1), (0.002, 2), (0.004, 1), (0.004, 2)]
    for row in rows:
        steps = [json.loads(line) for line in (Path(row["run"]) / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps if "grad_norm" in step] == list(range(1, STEPS + 1))


def begun(folder: Path) -> list[Path]:
    """Return the runs with some steps in their log."""
    return [path for path in (folder / "runs").glob("*/metrics.jsonl") if path.read_text().count("\n") >= 3]
