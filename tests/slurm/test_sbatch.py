"""slurm/pretrain.sbatch on the two-node cluster, with a probe in place of pretrain.py."""

from __future__ import annotations

import getpass
import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plumbline.launcher.runtime.cluster.attempts import LACKING, WRONG, accuse
from plumbline.launcher.runtime.ranks.world import read_world
from plumbline.launcher.runtime.run.status import note_early_end
from plumbline.launcher.runtime.system.exit_codes import UNUSABLE
from tests.slurm.probe import Probe, decisions, install

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster


@pytest.fixture
def probe(cluster: Cluster, tmp_path: Path) -> Probe:
    return install(cluster, tmp_path)


def test_ranks_find_each_other_their_cores_and_their_gpus(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=3")
    # As from within another job, which hands on its shape, at a site that hands on nothing
    submitted_in = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x80000000", "SLURM_EXPORT_ENV": "NONE"}
    job_id = probe.submit(*options, endings="0", extra=("run.name=x", "probe.text=x y"), variables=submitted_in)
    assert probe.cluster.wait_end(job_id)["JobState"] == "COMPLETED"

    found = probe.found_by_ranks(job_id)
    ranks = [rank["environment"] for rank in found]
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"127.0.0.1"}  # the node's address; "n1" is not a host's name
    assert {rank["MASTER_PORT"] for rank in ranks} == {str(20000 + int(job_id))}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"3"}
    assert {rank["SRUN_CPUS_PER_TASK"] for rank in ranks} == {"3"}
    assert not any("0x80000000" in rank.get("SLURM_CPU_BIND", "") for rank in ranks)
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}
    assert [rank["SLURMD_NODENAME"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert [rank["arguments"][1::4] for rank in found] == [[str(probe.folder / "a file.yaml"), "probe.text=x y"]] * 4

    monkeypatch.setattr(os, "environ", os.environ.copy())  # read_world adds to it
    os.environ.pop("RANK", None)
    for number, rank in enumerate(ranks):
        for name in (
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_ID",
            "SLURM_JOB_ID",
            "MASTER_ADDR",
        ):
            monkeypatch.setenv(name, rank[name])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        world = read_world()
        assert (world.rank, world.local_rank, world.size) == (number, number % 2, 4)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]


def test_ranks_start_in_a_container_with_options_of_the_site(probe: Probe, tmp_path: Path) -> None:
    """An image is whatever finds Python at another path than the node; requeue.py runs on the node."""
    image = tmp_path / "image"
    image.write_text('#!/bin/bash\n[[ $1 = run && $2 = /inside/python ]] && IMAGE=yes exec "$HOST" "${@:3}"\n')
    image.chmod(0o755)
    host = probe.cluster.environment["PLUMBLINE_PYTHON"]
    variables = {
        "PLUMBLINE_RUN": f"{image} run",
        "PLUMBLINE_PYTHON": "/inside/python",
        "PLUMBLINE_HOST_PYTHON": host,
        "HOST": host,
        "PLUMBLINE_SRUN_OPTIONS": f"--output={tmp_path}/rank-%t.log --open-mode=append",
    }
    facts, log = probe.end(probe.submit("--nodes=2", "--time=60", endings="saved said 1/said 0", variables=variables))
    assert facts == ("COMPLETED", "0:0", "1"), log
    assert (tmp_path / "rank-0.log").read_text() == "0: rank 0 here yes\n" * 2
    assert "here" not in log


def test_ranks_know_when_their_time_is_over(probe: Probe) -> None:
    limited, unlimited = (probe.submit(f"--time={limit}", endings="0") for limit in ("60", "UNLIMITED"))
    ends = []
    for job_id in (limited, unlimited):
        probe.end(job_id)
        (rank,) = probe.found_by_ranks(job_id)
        ends.append(rank["environment"]["SLURM_JOB_END_TIME"])
    begun = datetime.fromisoformat(probe.cluster.job(limited)["StartTime"]).timestamp()
    assert ends == [str(int(begun) + 3600), ""]


def test_what_would_fail_again_is_not_requeued(probe: Probe) -> None:
    jobs = {code: probe.submit("--nodes=2", endings=f"saved {code}") for code in ("2", "3")}
    for code, words in (("2", "configuration, data or run folder cannot be used"), ("3", "training broke down")):
        facts, log = probe.end(jobs[code])
        assert facts == ("FAILED", f"{code}:0", "0"), log
        assert f"exit code {code}, {words}: not requeued" in log


def test_asked_to_stop_a_job_requeues_itself(probe: Probe) -> None:
    # Slurm looks at time limits every 30 seconds, so the three ways of asking go side by side
    at_limit = probe.submit("--nodes=2", "--time=1", endings="stop/0")
    by_user, by_user_fully = (probe.submit("--nodes=2", endings="stop/0") for _ in range(2))
    for job_id, options in ((by_user, ()), (by_user_fully, ("--full",))):
        probe.wait_for_ranks(job_id)
        for _ in range(2):  # a second signal does no harm
            probe.cluster.run("scancel", "--signal=USR1", *options, job_id)  # --full: the batch shell gets it too

    for job_id in (by_user, by_user_fully, at_limit):
        facts, log = probe.end(job_id)
        assert facts == ("COMPLETED", "0:0", "1"), log
        assert "restart 0: 2 ranks on n[1-2]" in log  # appended to, not overwritten
        assert "restart 1: 2 ranks on n[1-2]" in log


def test_a_job_that_is_submitted_within_a_task_of_an_array_requeues_itself(probe: Probe) -> None:
    """Sbatch hands on that task's variables."""
    variables = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}
    job_id = probe.submit("--nodes=2", endings="saved 1/0", variables=variables)
    facts, log = probe.end(job_id)
    assert job_id != "1"
    assert facts == ("COMPLETED", "0:0", "1"), log


def test_ranks_that_hang_into_the_time_limit_are_tried_again(probe: Probe) -> None:
    facts, log = probe.end(probe.submit("--nodes=2", "--time=1", endings="hang/0"))
    assert facts == ("COMPLETED", "0:0", "1"), log
    words = "exit code 143, nothing saved after step 0, fruitless attempt 1 of 2 in a row: back into the queue"
    assert decisions(log) == [words, "exit code 0, complete: not requeued"]


def test_a_job_is_requeued_as_long_as_its_checkpoints_advance(probe: Probe) -> None:
    # Never two fruitless attempts in a row, so that the default limit of two is not reached
    job_id = probe.submit("--nodes=2", endings="killed/saved 1/1/0")
    gpus = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=3")
    bounded, once = (
        probe.submit(*gpus, endings="saved 1/1/1/0", variables=variables)
        for variables in ({}, {"PLUMBLINE_FRUITLESS_ATTEMPTS": "1"})
    )

    facts, log = probe.end(job_id)
    assert facts == ("COMPLETED", "0:0", "3"), log
    assert decisions(log) == [
        "exit code 137, nothing saved after step 0, fruitless attempt 1 of 2 in a row: back into the queue",
        "exit code 1, what is saved went from step 0 to step 2: back into the queue",
        "exit code 1, nothing saved after step 2, fruitless attempt 1 of 2 in a row: back into the queue",
        "exit code 0, complete: not requeued",
    ]
    assert "meeting at 127.0.0.1" in log
    facts, log = probe.end(bounded)
    assert facts == ("FAILED", "1:0", "2"), log
    assert decisions(log)[1:] == [
        "exit code 1, nothing saved after step 1, fruitless attempt 1 of 2 in a row: back into the queue",
        "exit code 1, nothing saved after step 1, fruitless attempt 2 of 2 in a row: not requeued",
    ]
    facts, log = probe.end(once)
    assert facts == ("FAILED", "1:0", "1"), log


def test_a_job_that_may_not_be_requeued_says_what_goes_on(probe: Probe) -> None:
    facts, log = probe.end(probe.submit("--no-requeue", endings="saved 1"))
    assert facts == ("FAILED", "1:0", "0"), log
    (decision,) = decisions(log)
    assert decision.startswith("exit code 1, what is saved went from step 0 to step 1, but Slurm refuses to requeue")
    assert decision.endswith("): the same command, or the next job of a chain, goes on from the newest checkpoint")


def test_a_cancelled_job_stays_cancelled(probe: Probe) -> None:
    job_id = probe.submit("--nodes=2", endings="hang/0", extra=("run.name=cancelled",))
    probe.wait_for_ranks(job_id)
    probe.cluster.run("scancel", job_id)
    facts, log = probe.end(job_id)
    assert (facts[0], facts[2]) == ("CANCELLED", "0"), log
    assert decisions(log) == ["exit code 143, ended by Slurm or by a person: the job is COMPLETING and left as it is"]
    assert not (probe.folder / "runs" / "cancelled").exists()  # it was no fruitless attempt


def test_mistakes_of_the_submitter_are_said_in_the_log(probe: Probe, tmp_path: Path) -> None:
    mistakes = {
        "no slurm/job.sh in": {"PLUMBLINE_ROOT": str(tmp_path / "slurm")},
        "cannot execute /nowhere/python": {"PLUMBLINE_PYTHON": "/nowhere/python"},
        "PLUMBLINE_FRUITLESS_ATTEMPTS is none: give": {"PLUMBLINE_FRUITLESS_ATTEMPTS": "none"},
    }
    jobs = {words: probe.submit(endings="0", variables=variables) for words, variables in mistakes.items()}
    for words, job_id in jobs.items():
        facts, log = probe.end(job_id)
        assert facts[:2] == ("FAILED", "2:0"), log
        assert words in log


@pytest.mark.parametrize(("code", "fault"), [(87, WRONG), (89, LACKING)])
def test_the_next_attempt_does_without_a_node_that_a_rank_has_accused(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, code: int, fault: str
) -> None:
    """Both nodes are accused, of which the job has one: the other is not its own."""
    job_id = probe.submit("--nodes=1", endings=f"later {code}/0", extra=("run.name=accused",))
    probe.wait_for_ranks(job_id, 1)
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    accuse(probe.folder / "runs" / "accused" / "slurm", ["n1", "n2"], fault)
    (probe.folder / "now").touch()
    facts, log = probe.end(job_id)
    assert facts == ("COMPLETED", "0:0", "1"), log
    first, second = (
        json.loads((probe.folder / f"job-{job_id}-attempt-{attempt}-rank-0.json").read_text())["environment"]
        for attempt in (0, 1)
    )
    assert {first["SLURMD_NODENAME"], second["SLURMD_NODENAME"]} == {"n1", "n2"}
    node = first["SLURMD_NODENAME"]
    assert decisions(log)[0].endswith(f"back into the queue, without {node} ({node} {fault})")


def test_a_job_in_a_reservation_keeps_to_its_nodes(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node is idle, but this job would wait for it for ever."""
    made = ("reservationname=ours", "starttime=now", "duration=60", f"users={getpass.getuser()}", "nodes=n1")
    probe.cluster.run("scontrol", "create", "reservation", *made)
    try:
        options = ("--nodes=1", "--reservation=ours")
        job_id = probe.submit(*options, endings="later 87/0", extra=("run.name=reserved",))
        probe.wait_for_ranks(job_id, 1)
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
        accuse(probe.folder / "runs" / "reserved" / "slurm", ["n1"], WRONG)
        (probe.folder / "now").touch()
        facts, log = probe.end(job_id)
    finally:
        probe.cluster.run("scontrol", "delete", "reservationname=ours")
    assert facts == ("COMPLETED", "0:0", "1"), log
    assert decisions(log)[0].endswith(f"n1 {WRONG}, but without it there are too few nodes")


def test_what_rank_0_alone_refuses_is_final(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Srun returns the code of the ranks that wait for it, and are killed."""
    variables = {"PLUMBLINE_SRUN_OPTIONS": "--wait=5"}
    job_id = probe.submit("--nodes=2", endings="later alone 2/0", extra=("run.name=alone",), variables=variables)
    probe.wait_for_ranks(job_id)
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    folder = probe.folder / "runs" / "alone"
    folder.mkdir(parents=True)
    note_early_end(folder, 2, lambda _folder: None, UNUSABLE, "metrics.trackers")
    (probe.folder / "now").touch()
    facts, log = probe.end(job_id)
    assert (facts[0], facts[2]) == ("FAILED", "0"), log
    assert facts[1] != "2:0"
    assert decisions(log) == ["exit code 2, configuration, data or run folder cannot be used: not requeued"]
