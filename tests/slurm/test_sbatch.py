"""slurm/pretrain.sbatch on the two-node cluster, with a probe in place of pretrain.py.

The probe writes down the environment that each rank of each attempt finds, then ends the way its arguments say. So
everything between sbatch and the ranks is the real thing, and a job takes a second.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.system.world import read_world

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

SLURM_FOLDER = Path(__file__).resolve().parents[2] / "slurm"

PROBE = """
import json, os, signal, sys, time
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))
job, rank = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_PROCID"])
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
folder, ending = sys.argv[1:3]
with open(f"{folder}/job-{job}-attempt-{attempt}-rank-{rank}.json", "w") as file:
    json.dump({"environment": dict(os.environ), "arguments": sys.argv[3:]}, file)
if ending == "stop-once" and attempt == "0":
    while not stop:
        time.sleep(0.05)
    time.sleep(rank)  # ranks never end at the same instant
    sys.exit(85)
sys.exit(0 if ending == "stop-once" else int(ending))
"""


@dataclass(frozen=True)
class Probe:
    """Submit probe jobs and read what they wrote."""

    cluster: Cluster
    folder: Path

    def submit(self, *sbatch_options: str, ending: str, extra: tuple[str, ...] = (), **variables: str) -> str:
        """Queue a job of the probe; returns its id."""
        environment = {**self.cluster.environment, "PLUMBLINE_ROOT": str(self.folder), **variables}
        job = (str(SLURM_FOLDER / "pretrain.sbatch"), str(self.folder), ending, *extra)
        cluster = replace(self.cluster, environment=environment)
        return cluster.run("sbatch", "--parsable", *sbatch_options, *job, cwd=self.folder)

    def wait_for_ranks(self, job_id: str) -> None:
        """Wait until both ranks of the first attempt have begun."""
        files = [self.folder / f"job-{job_id}-attempt-0-rank-{rank}.json" for rank in range(2)]
        self.cluster.wait_for(job_id, lambda _: all(file.exists() for file in files))

    def found_by_ranks(self, job_id: str) -> list[dict[str, Any]]:
        """Return what each rank of the first attempt wrote down, in the order of ranks."""
        files = sorted(self.folder.glob(f"job-{job_id}-attempt-0-rank-*.json"))
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def probe(cluster: Cluster, tmp_path: Path) -> Probe:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "pretrain.py").write_text(PROBE)
    shutil.copytree(SLURM_FOLDER, tmp_path / "slurm")
    return Probe(cluster, tmp_path)


def test_ranks_find_each_other_their_cores_and_their_gpus(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=3")
    job_id = probe.submit(*options, ending="0", extra=("--config", "a file.yaml", "run.name=x y"))
    assert probe.cluster.wait_end(job_id)["JobState"] == "COMPLETED"

    found = probe.found_by_ranks(job_id)
    ranks = [rank["environment"] for rank in found]
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"127.0.0.1"}  # the node's address; "n1" is not a host's name
    assert {rank["MASTER_PORT"] for rank in ranks} == {str(20000 + int(job_id))}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"3"}
    assert {rank["SRUN_CPUS_PER_TASK"] for rank in ranks} == {"3"}
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}
    assert [rank["SLURMD_NODENAME"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert [rank["arguments"] for rank in found] == [["--config", "a file.yaml", "run.name=x y"]] * 4

    monkeypatch.setattr(os, "environ", os.environ.copy())  # read_world adds to it
    os.environ.pop("RANK", None)
    for number, rank in enumerate(ranks):
        for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID", "MASTER_ADDR"):
            monkeypatch.setenv(name, rank[name])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        world = read_world()
        assert (world.rank, world.local_rank, world.size) == (number, number % 2, 4)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]


def test_a_failure_is_passed_on_and_not_requeued(probe: Probe) -> None:
    job = probe.cluster.wait_end(probe.submit("--nodes=2", ending="3"))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "3:0", "0")


def test_asked_to_stop_a_job_requeues_itself(probe: Probe) -> None:
    # Slurm looks at time limits every 30 seconds, so the three ways of asking go side by side
    at_limit = probe.submit("--nodes=2", "--time=1", ending="stop-once")
    by_user, by_user_fully = (probe.submit("--nodes=2", ending="stop-once") for _ in range(2))
    for job_id, options in ((by_user, ()), (by_user_fully, ("--full",))):
        probe.wait_for_ranks(job_id)
        probe.cluster.run("scancel", "--signal=USR1", *options, job_id)  # --full: the batch shell gets it too

    for job_id in (by_user, by_user_fully, at_limit):
        job = probe.cluster.wait_end(job_id)
        log = Path(job["StdOut"]).read_text()
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
        assert "restart 0: 2 ranks on n[1-2]" in log  # appended to, not overwritten
        assert "restart 1: 2 ranks on n[1-2]" in log


def test_requeueing_is_bounded(probe: Probe) -> None:
    job = probe.cluster.wait_end(probe.submit("--nodes=2", ending="85", PLUMBLINE_MAX_RESTARTS="1"))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "85:0", "1")
    assert "stopped after 1 restarts (PLUMBLINE_MAX_RESTARTS)" in Path(job["StdOut"]).read_text()


def test_mistakes_of_the_submitter_are_said_in_the_log(probe: Probe, tmp_path: Path) -> None:
    lost = probe.submit(ending="0", PLUMBLINE_ROOT=str(tmp_path / "slurm"))
    no_python = probe.submit(ending="0", PLUMBLINE_PYTHON="/nowhere/python")
    for job_id, words in ((lost, "no launcher/pretrain.py in"), (no_python, "cannot execute /nowhere/python")):
        job = probe.cluster.wait_end(job_id)
        assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0")
        assert words in Path(job["StdOut"]).read_text()
