"""What Slurm says about itself and a job is read, and what would cost a checkpoint or a requeue is warned of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plumbline.launcher.runtime.cluster import nodes
from plumbline.launcher.runtime.doctor import slurm
from plumbline.launcher.runtime.doctor.check import Place
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.installation import ROOT

if TYPE_CHECKING:
    from tests.launcher.runtime.doctor.conftest import Reports

# Lines of Slurm 22.05, on the cluster of tests/slurm with KillWait and SlurmdTimeout as Slurm has them by default
CONFIGURATION = """\
Configuration data as of 2026-11-24T03:03:26
AuthInfo                = socket=/run/munge.socket,cred_expire=5
JobRequeue              = 1
KillWait                = 30 sec
PreemptMode             = OFF
PreemptType             = preempt/none
SlurmctldParameters     = (null)
SlurmdTimeout           = 300 sec

Slurmctld(primary) at localhost is UP
"""
JOB = (
    "JobId=1 JobName=pretrain UserId=root(0) Priority=4294901759 QOS=(null) JobState=RUNNING Reason=None "
    "Requeue=1 Restarts=0 BatchFlag=1 RunTime=00:00:00 TimeLimit=1-00:00:00 Partition=main NodeList=n1 "
    "TRES=cpu=1,node=1,billing=1 Command=bash WorkDir=/work Power= \n"
)
PARTITION = "PartitionName=main GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-2] PreemptMode=OFF State=UP\n"


def facts(configuration: str = CONFIGURATION, job: str = JOB, partition: str = PARTITION, **own: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "cores": 4,
        "threads": "4",
        "cores asked for": "",
        "configuration": slurm.settings(configuration),
        "job": nodes.read_fields(job),
        "partition": nodes.read_fields(partition),
        "notice": 300,
        **own,
    }


def test_answers_of_scontrol_are_read() -> None:
    read = slurm.settings(CONFIGURATION)
    assert (read["KillWait"], read["JobRequeue"]) == ("30 sec", "1")
    assert read["AuthInfo"] == "socket=/run/munge.socket,cred_expire=5"
    assert nodes.read_fields(JOB)["TRES"] == "cpu=1,node=1,billing=1"
    assert nodes.read_fields(JOB)["TimeLimit"] == "1-00:00:00"
    assert slurm.settings("") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30 sec", 30), ("00:06:00", 360), ("1-02:00:05", 93605), ("UNLIMITED", None), ("", None)],
)
def test_times_are_read(text: str, expected: float | None) -> None:
    assert slurm.seconds(text) == expected


def test_the_notice_is_that_of_the_job_script() -> None:
    script = (ROOT / "slurm" / "pretrain.sbatch").read_text()
    assert f"--signal=USR1@{slurm.notice()}\n" in script


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (facts(CONFIGURATION.replace("= 30 sec", "= 2 sec")), "KillWait = 2 s: "),
        (facts(CONFIGURATION.replace("= 300 sec", "= 0 sec")), "SlurmdTimeout = 0 s: a node that dies is never"),
        (
            facts(CONFIGURATION.replace("= 300 sec", "= 7200 sec")),
            "SlurmdTimeout = 7200 s: a node that dies is noticed",
        ),
        (facts(job=JOB.replace("Requeue=1", "Requeue=0")), "this job may not be requeued"),
        (facts(CONFIGURATION.replace("JobRequeue              = 1", "JobRequeue = 0"), job=""), "this job may not be"),
        (
            facts(job=JOB.replace("1-00:00:00", "00:12:00")),
            "a time limit of 720 s, of which up to 360 s are the notice",
        ),
        (facts(threads="8"), "rank 0 is bound to 4 core(s), OMP_NUM_THREADS is 8"),
        (facts(**{"cores asked for": "12"}), "rank 0 is bound to 4 core(s), SLURM_CPUS_PER_TASK is 12"),
    ],
)
def test_what_would_cost_a_checkpoint_is_warned_of(reports: Reports, changed: dict[str, Any], text: str) -> None:
    assert [finding.level for finding in slurm.judge(reports([facts()]))] == ["ok"]
    (found,) = slurm.judge(reports([changed]))
    assert found.level == "warning"
    assert found.text.startswith(text)


def test_a_preemption_without_notice_is_warned_of(reports: Reports) -> None:
    preempting = CONFIGURATION.replace("preempt/none", "preempt/partition_prio")
    partition = PARTITION.replace("PreemptMode=OFF", "PreemptMode=REQUEUE")
    findings = slurm.judge(reports([facts(preempting, partition=partition)]))
    assert [finding.text for finding in findings] == [
        "jobs may be preempted (PreemptMode REQUEUE), and get no USR1 ahead of it",
        "jobs may be preempted (PreemptMode REQUEUE), with GraceTime 0: there is no time to save",
    ]
    assert findings[0].remedy == (
        "have PreemptParameters=send_user_signal (in older versions of Slurm "
        "SlurmctldParameters=preempt_send_user_signal) set, or set checkpoint.interval small"
    )
    kind = partition.replace("GraceTime=0", "GraceTime=120")
    older = preempting.replace("(null)", "preempt_send_user_signal,idle_on_node_suspend")
    newer = f"{preempting}PreemptParameters = min_exempt_priority=9,send_user_signal\n"
    for told in (older, newer):
        assert [finding.level for finding in slurm.judge(reports([facts(told, partition=kind)]))] == ["ok"]
    assert [finding.level for finding in slurm.judge(reports([facts(preempting)]))] == ["ok"], "its partition is spared"


BY_QOS = CONFIGURATION.replace("preempt/none", "preempt/qos").replace("= OFF", "= REQUEUE")
# As sacctmgr prints them; `cluster` is where a QOS says nothing of its own
QOS = "normal|cluster|00:00:00\nscavenger|requeue|00:02:00\nurgent|off|00:00:00\n"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("normal", ["(PreemptMode REQUEUE), and get no USR1", "(PreemptMode REQUEUE), with GraceTime 0"]),
        ("scavenger", ["(PreemptMode REQUEUE), and get no USR1"]),
        ("urgent", []),
        ("(null)", ["(PreemptType preempt/qos); how could not be told"]),
    ],
)
def test_a_preemption_by_qos_is_that_of_the_job(reports: Reports, name: str, texts: list[str]) -> None:
    """Whatever its partition says, which then counts for nothing."""
    partition = PARTITION.replace("PreemptMode=OFF", "PreemptMode=SUSPEND")
    found = slurm.judge(reports([facts(BY_QOS, partition=partition, qos=slurm.qos(QOS, name))]))
    warnings = [finding.text for finding in found if finding.level == "warning"]
    assert len(warnings) == len(texts)
    assert all(f"jobs may be preempted {text}" in warning for text, warning in zip(texts, warnings, strict=True))


def test_sacctmgr_is_asked_for_the_qos_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "scontrol": f"[[ $* == *config* ]] && echo '{BY_QOS}' || echo QOS=scavenger asked=${{@: -1}}",
        "sacctmgr": f"echo '{QOS}'",
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    place = Place(World(0, 0, 1, torch.device("cpu")), Path("runs/none"))
    assert slurm.measure(place)["qos"] == {"PreemptMode": "REQUEUE", "GraceTime": "00:02:00"}
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")  # of the last task of an array
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.measure(place)["job"]["asked"] == "7_3"
    (tmp_path / "sacctmgr").write_text("#!/bin/false\n")
    assert slurm.measure(place)["qos"] is None


def test_a_gpu_with_hardly_a_core_is_warned_of(reports: Reports) -> None:
    """Which Slurm gives to each rank where nobody says how many."""
    alone = facts(cores=1, threads="1", device="cuda")
    (found,) = slurm.judge(reports([facts(), alone]))
    assert (found.level, found.node) == ("warning", "n1")
    assert found.text.startswith("rank 1 has 1 core(s) beside its GPU")
    assert [each.level for each in slurm.judge(reports([facts(device="cuda")]))] == ["ok"]
    assert [each.level for each in slurm.judge(reports([facts(cores=1, threads="1")]))] == ["ok"]


def test_without_a_cluster_it_is_skipped(reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = slurm.judge(reports([slurm.measure(Place(World(0, 0, 1, torch.device("cpu")), Path("runs/none")))]))
    assert [finding.text for finding in found] == ["no Slurm: skipped"]
