"""Which nodes of a job are lost, and whether it can do without them, as a made-up Slurm tells it.

The real one is asked by tests/slurm/test_node_failure.py.
"""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from plumbline.launcher.runtime.cluster import nodes

SCONTROL = """\
#!/bin/bash
echo "$*" >> {folder}/asked
case "$*" in
*"show job"*) echo "JobId=7 JobName=a b JobState=RUNNING Reason=None NodeList=n[1-3] ExcNodeList=n9 NumNodes=3-3 \
StartTime=2026-11-30T16:20:00 PreemptTime=$(cat {folder}/preempted) Partition=big,old \
Features=$(cat {folder}/constraint)" ;;
*"show node"*) [[ ! -e {folder}/private ]] || {{ echo "slurm_load_node error: Access/permission denied" >&2; exit 1; }}
    cat {folder}/nodes ;;
*"show reservation r"*) echo "ReservationName=r Nodes=n[1-3] NodeCnt=3 Users=me State=ACTIVE" ;;
*"hostnames n[1-3]"*) printf 'n1\nn2\nn3\n' ;;
*"hostnames"*) echo "${{@: -1}}" ;;
requeue*) read -r left says 2>/dev/null < {folder}/refused || exit 0
    [[ $left == 0 ]] && exit 0
    echo "$((left - 1)) $says" > {folder}/refused
    echo "$says" >&2; exit 1 ;;
esac
"""
SRUN = """\
#!/bin/bash
echo "srun $* memory:$SLURM_MEM_PER_NODE$SLURM_CPU_BIND" >> {folder}/asked
echo 'srun: error: n1: task 0: Killed' >&2
cat {folder}/says >&2
[[ ! -e {folder}/hangs ]] || exec sleep 100
exit 1
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a Slurm on the path that answers from files of the folder which is returned."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "says").touch()
    (tmp_path / "constraint").write_text("h100&ib")
    (tmp_path / "preempted").write_text("None")
    tell(tmp_path, *(f"n{number}" for number in range(1, 5)))
    return tmp_path


def tell(folder: Path, *names: str, spare: str = "gpu:8", **states: str) -> None:
    """Say which nodes there are; their states are MIXED unless given, and n4 has the devices `spare`."""
    (folder / "nodes").write_text(
        "".join(
            f"NodeName={name} Arch=x State={states.get(name, 'MIXED')} Partitions=big ActiveFeatures=h100,ib,rack-1 "
            f"Gres={spare if name == 'n4' else 'gpu:8'}\n"
            for name in names
        )
    )


@pytest.fixture
def job(slurm: Path) -> nodes.Job:
    return nodes.read_job("7")


def test_a_job_is_read(job: nodes.Job) -> None:
    features, partitions = frozenset({"h100", "ib"}), frozenset({"big", "old"})
    assert job == nodes.Job("7", "7", "RUNNING", "None", ("n1", "n2", "n3"), ("n9",), 3, partitions, features)


@pytest.mark.parametrize(
    ("time", "expected"), [("None", False), ("2026-11-30T16:26:51", True), ("2026-11-30T16:11:00", False)]
)
def test_a_preemption_of_this_attempt_is_seen(slurm: Path, time: str, expected: bool) -> None:
    (slurm / "preempted").write_text(time)
    assert nodes.read_job("7").preempted == expected


@pytest.mark.parametrize("state", ["DOWN", "DOWN*+DRAIN", "MIXED*", "ALLOCATED+NOT_RESPONDING", "FAIL"])
def test_a_node_that_slurm_gave_up_is_lost(slurm: Path, job: nodes.Job, state: str) -> None:
    tell(slurm, "n1", "n2", "n3", "n4", n2=state, n4="DOWN")
    assert nodes.lost_nodes(job) == ["n2"]


@pytest.mark.parametrize(
    ("state", "why", "may"),
    [
        ("RUNNING", "None", True),
        ("COMPLETING", "TimeLimit", True),
        ("COMPLETING", "None", False),
        ("PENDING", "x", False),
    ],
)
def test_what_slurm_or_a_person_ended_is_left_alone(job: nodes.Job, state: str, why: str, may: bool) -> None:
    assert nodes.may_go_on(replace(job, state=state, why=why)) == may


def test_a_node_that_starts_no_step_is_lost_and_one_whose_task_was_killed_is_not(slurm: Path, job: nodes.Job) -> None:
    (slurm / "says").write_text("")
    assert nodes.lost_nodes(job) == []
    (slurm / "says").write_text(
        "srun: error: Task launch for StepId=7.1 failed on node n3: Communication connection failure\n"
        "srun: error: Application launch failed: Communication connection failure\n"
    )
    assert nodes.lost_nodes(job) == ["n3"]


def test_where_most_nodes_refuse_a_step_it_is_not_the_nodes(slurm: Path, job: nodes.Job) -> None:
    refused = "srun: error: Task launch for StepId=7.1 failed on node {}: Unable to satisfy cpu bind request\n"
    unreached = "srun: error: Task launch for StepId=7.1 failed on node {}: Communication connection failure\n"
    (slurm / "says").write_text(refused.format("n1"))
    assert nodes.lost_nodes(job) == ["n1"]
    (slurm / "says").write_text(refused.format("n1") + refused.format("n2"))
    assert nodes.lost_nodes(job) == []
    (slurm / "says").write_text(refused.format("n1") + refused.format("n2") + unreached.format("n3"))
    assert nodes.lost_nodes(job) == ["n3"]
    (slurm / "says").write_text("".join(unreached.format(node) for node in ("n1", "n2", "n3")))
    assert nodes.lost_nodes(job) == ["n1", "n2", "n3"]  # a switch that is gone


def test_a_node_is_not_waited_for_without_end(slurm: Path, job: nodes.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "ASK_SECONDS", 2)
    (slurm / "hangs").touch()
    assert nodes.lost_nodes(job) == []
    (slurm / "says").write_text("srun: error: Task launch for StepId=7.1 failed on node n3: Timed out\n")
    assert nodes.lost_nodes(job) == ["n3"]


def test_nodes_are_asked_without_the_memory_gpus_and_cores_of_the_ranks(
    slurm: Path, job: nodes.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0x1")
    nodes.lost_nodes(job)
    asked = next(line for line in (slurm / "asked").read_text().splitlines() if line.startswith("srun"))
    assert "--jobid=7 --overlap" in asked
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1" in asked
    assert asked.endswith("true memory:")


@pytest.mark.parametrize("constraint", ["(null)", "h100", "rack-1", "h100|a100", "[rack-1|rack-2]", "h100*3&ib"])
def test_a_job_spares_a_node_whatever_its_constraint(slurm: Path, constraint: str) -> None:
    (slurm / "constraint").write_text(constraint)
    tell(slurm, "n1", "n2", "n3", "n4")
    assert nodes.sparable(nodes.read_job("7"), ["n2"]) == ["n2"]
    lines = (slurm / "nodes").read_text().splitlines()
    others = lines[3].replace("h100,ib,rack-1", "a100,rack-2")  # may serve as well, or not: it is not counted
    (slurm / "nodes").write_text("\n".join([*lines[:3], others]))
    assert nodes.sparable(nodes.read_job("7"), ["n2"]) == (["n2"] if constraint == "(null)" else [])


@pytest.mark.parametrize(
    ("states", "spare"),
    [({}, True), ({"n4": "DOWN"}, False), ({"n4": "IDLE+DRAIN"}, False), ({"n1": "DRAINED", "n5": "IDLE"}, True)],
)
def test_a_job_spares_a_node_if_enough_are_left(
    slurm: Path, job: nodes.Job, states: dict[str, str], spare: bool
) -> None:
    tell(slurm, "n1", "n2", "n3", "n4", *({"n5"} & set(states)), **states)
    assert nodes.sparable(job, ["n2"]) == (["n2"] if spare else [])


def test_nodes_that_it_cannot_have_are_not_enough(slurm: Path, job: nodes.Job) -> None:
    assert nodes.sparable(job, ["n2"]) == ["n2"]
    assert nodes.sparable(replace(job, excluded=("n4",)), ["n2"]) == []
    assert nodes.sparable(replace(job, features=frozenset({"h200"})), ["n2"]) == []
    assert nodes.sparable(replace(job, partitions=frozenset({"small"})), ["n2"]) == []
    tell(slurm, "n1", "n2", "n3", "n4", spare="(null)")
    assert nodes.sparable(job, ["n2"]) == []


def test_as_many_are_spared_as_leave_it_enough(slurm: Path, job: nodes.Job) -> None:
    assert nodes.sparable(job, ["n3", "n2"]) == ["n3"]
    tell(slurm, "n1", "n2", "n3", "n4", "n5", n2="DOWN*")  # no job starts on n2 in any case
    assert nodes.sparable(job, ["n3", "n2"]) == ["n3", "n2"]


def test_a_reservation_is_where_its_jobs_run_and_others_do_not(slurm: Path, job: nodes.Job) -> None:
    assert nodes.sparable(replace(job, reservation="r"), ["n2"]) == [], "it has three nodes alone"
    tell(slurm, "n1", "n2", "n3", "n4", n4="IDLE+RESERVED")
    assert nodes.sparable(job, ["n2"]) == []
    tell(slurm, "n1", "n2", "n3", "n4", n1="MIXED+RESERVED", n2="MIXED+RESERVED", n3="MIXED+RESERVED")
    assert nodes.sparable(replace(job, reservation="r", count=2), ["n2"]) == ["n2"]


def test_a_requeued_job_keeps_the_nodes_that_it_excluded_before(slurm: Path, job: nodes.Job) -> None:
    nodes.requeue(job)
    nodes.exclude(job, ["n2"])
    assert (slurm / "asked").read_text().splitlines()[-2:] == ["requeue 7", "update JobId=7 ExcNodeList=n2,n9"]


def test_a_job_that_slurm_does_not_requeue_is_an_error_in_its_words(slurm: Path, job: nodes.Job) -> None:
    (slurm / "refused").write_text("9 Job is not allowed to\n")
    with pytest.raises(ValueError, match="scontrol requeue 7: Job is not allowed to"):
        nodes.requeue(job)
    assert (slurm / "asked").read_text().splitlines().count("requeue 7") == 1


@pytest.mark.parametrize("says", ["Unable to contact slurm controller (connect failure)", "Socket timed out on send"])
def test_a_controller_that_is_away_for_a_moment_is_asked_again(
    slurm: Path, job: nodes.Job, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    paused: list[float] = []
    monkeypatch.setattr("time.sleep", paused.append)
    (slurm / "refused").write_text(f"2 {says}\n")
    nodes.requeue(job)
    assert (slurm / "asked").read_text().splitlines()[-3:] == ["requeue 7"] * 3
    assert paused == [10.0] * 2
    (slurm / "refused").write_text(f"9 {says}\n")
    with pytest.raises(ValueError, match=r"scontrol requeue 7: .*(Unable to contact|Socket timed out)"):
        nodes.requeue(job)
    assert sum(paused) == 80, "a minute more"


def test_ranks_meet_at_the_first_node_by_its_name_where_slurm_keeps_addresses_to_itself(slurm: Path) -> None:
    (slurm / "nodes").write_text("NodeName=n1 NodeAddr=10.0.0.1 State=IDLE\n")
    assert nodes.first_address("n[1-3]") == "10.0.0.1"
    (slurm / "private").touch()
    assert nodes.first_address("n[1-3]") == "n1"


def test_a_task_of_an_array_is_known_by_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the last of its tasks is that of the array: to requeue it is to requeue them all."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert nodes.own_job() is None
    monkeypatch.setenv("SLURM_JOB_ID", "30")
    assert nodes.own_job() == "30"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "30")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert nodes.own_job() == "30_2"
    monkeypatch.setenv("SLURM_JOB_ID", "32")
    assert nodes.own_job() == "32", "an earlier task, or a job that was submitted from within one"
