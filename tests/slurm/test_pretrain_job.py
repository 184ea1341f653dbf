"""Real pretraining on the two-node cluster: interrupted, requeued jobs end where an uninterrupted one does.

The jobs run at the same time: three of the same configuration, of which one is stopped halfway and one loses a rank,
and one that is submitted by hand with a configuration that does not exist. The uninterrupted run is a chain of two.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]


STEPS = 600  # so many that a job is still training when it is stopped


def test_interrupted_jobs_end_with_the_losses_of_an_uninterrupted_one(cluster: Cluster, config: Path) -> None:
    wrong = cluster.run("sbatch", "--parsable", "--nodes=2", *by_hand("--config", "nowhere.yaml"), cwd=config.parent)
    whole, then = cluster.submit(config, *named("whole"), "--chain", "2")
    (stopped,) = cluster.submit(config, *named("stopped"))
    (killed,) = cluster.submit(config, *named("killed"), "checkpoint.interval=10")
    runs = config.parent / "runs"

    cluster.wait_for(stopped, lambda _: len(losses(runs / "stopped")) >= 5)
    cluster.run("scancel", "--signal=USR1", stopped)
    cluster.wait_for(killed, lambda _: (runs / "killed" / "checkpoints" / "step_00000010").exists())
    rank_of(killed, 1).kill()
    cluster.wait_for(stopped, lambda job: job["Restarts"] == "1")
    saved = len(losses(runs / "stopped"))
    assert 5 <= saved < STEPS
    assert (runs / "stopped" / "checkpoints" / f"step_{saved:08d}" / "manifest.json").exists()

    jobs = [cluster.wait_end(job_id) for job_id in (whole, stopped, wrong, killed, then)]
    facts = [(job["JobState"], job["ExitCode"], job["Restarts"]) for job in jobs]
    logs = [Path(job["StdOut"]).read_text() for job in jobs]
    complete, requeued, refused = (("COMPLETED", "0:0", "0"), ("COMPLETED", "0:0", "1"), ("FAILED", "2:0", "0"))
    assert facts == [complete, requeued, refused, requeued, complete], "\n".join(logs)
    assert "exit code 137, what is saved went from step 0 to" in logs[3]
    assert "nothing to do" in logs[4]
    assert jobs[4]["StartTime"] >= jobs[0]["EndTime"]
    assert f"resuming after step {saved}" in logs[1]
    assert "nowhere.yaml: no such file" in logs[2]

    assert losses(runs / "stopped") == losses(runs / "killed") == losses(runs / "whole")
    assert list(losses(runs / "whole")) == list(range(1, STEPS + 1))
    results = [json.loads((runs / name / "result.json").read_text()) for name in ("whole", "stopped", "killed")]
    assert results[0] == results[1] == results[2]


def named(name: str) -> tuple[str, str]:
    return f"run.name={name}", f"train.steps={STEPS}"


def rank_of(job_id: str, rank: int) -> psutil.Process:
    """Return the process of a rank of a job."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found, parent = process.environ(), process.parent()
            mine = (found.get("SLURM_JOB_ID"), found.get("SLURM_PROCID"), found.get("SLURM_STEP_ID"))
            # Data workers have the rank's variables, not its parent
            if mine == (job_id, str(rank), "0") and parent is not None and parent.name() == "slurmstepd":
                return process
    raise AssertionError(f"job {job_id} has no rank {rank}")


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
