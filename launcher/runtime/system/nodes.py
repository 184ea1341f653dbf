"""Name the nodes of a job, find those that do not answer, and keep them out of its next attempt.

Slurm itself counts a node as up for SlurmdTimeout (300 s by default) after it was last heard of, while a job ends
within `srun --wait` of the loss of a rank. So the nodes are asked, by a job step that does nothing.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

DOWN = re.compile(r"\bDOWN\b|\bFAIL\b|NOT_RESPONDING|\*")
"""What marks a node in Slurm's State as lost to its jobs: DOWN+DRAIN, ALLOCATED*, MIXED+NOT_RESPONDING."""
UNUSABLE_NODE = re.compile(rf"{DOWN.pattern}|DRAIN|MAINT")
"""What marks a node on which no job starts."""
LAUNCH_FAILED = re.compile(r"failed on node ([^\s:]+):(.*)")
"""The node, and why: it is not reached, or it refuses what is asked for."""
NOT_REACHED = re.compile("ommunication|onnection|imed out|Zero Bytes|receive failure|No route|not responding")
UNREACHED = re.compile("Unable to contact slurm controller|Socket timed out")
"""What Slurm's commands say while the controller starts again, or has too much to do."""
PAUSES = (10.0,) * 6
"""Seconds between tries to reach it."""
NOBODY = ("", "(null)")
ASK_SECONDS = 120
"""Time for all nodes to start a step. A node that is gone is given up on within the sum of Slurm's own timeouts."""


@dataclass(frozen=True)
class Job:
    """Say what the controller knows of a job."""

    id: str
    """Of a task of an array ARRAY_TASK: its own number is the array's as well if it is the last of them."""
    number: str
    state: str
    """RUNNING while the batch script is left to itself; COMPLETING while Slurm ends it, too."""
    why: str
    """Why it is in this state: TimeLimit, for example."""
    nodes: tuple[str, ...]
    excluded: tuple[str, ...]
    count: int
    """How many nodes it asks for."""
    partitions: frozenset[str]
    features: frozenset[str]
    """Words of --constraint, whatever stands between them; counts of nodes among them."""
    reservation: str = ""
    """Whose nodes alone it may have; empty: those that are not reserved."""


def names_in(nodes: str) -> tuple[str, ...]:
    """Return the names that a list of nodes of Slurm's stands for: n[1-2] is n1 and n2.

    Raises:
        OSError: there is no scontrol here.
        ValueError: it is no such list.
    """
    return () if not _unless_null(nodes) else tuple(_scontrol("show", "hostnames", nodes).split())


def first_address(nodes: str) -> str:
    """Return where Slurm reaches the first of a list of nodes; their names need not resolve.

    It is the name where Slurm does not tell its users of nodes (PrivateData=nodes), as in slurm/pretrain.sbatch.

    Raises:
        OSError, ValueError: likewise.
        IndexError: the list is empty.
    """
    first = names_in(nodes)[0]
    try:
        return read_fields(_scontrol("--oneliner", "show", "node", first))["NodeAddr"]
    except (ValueError, KeyError):
        return first


def node_name() -> str:
    """Return the name of this node, as Slurm or else the system has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_job() -> str | None:
    """Return the id of the job that this process is in, by which Slurm's commands know it alone; None outside of one.

    The number of one task of an array is that of the array, which stands for all its tasks.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return os.environ.get("SLURM_JOB_ID") if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def read_job(job_id: str) -> Job:
    """Return what the controller knows of a job. Raises ValueError with Slurm's words where it does not answer."""
    fields = job_fields(job_id)
    return Job(
        job_id,
        fields["JobId"],
        fields["JobState"],
        fields["Reason"],
        names_in(fields["NodeList"]),
        names_in(fields["ExcNodeList"]),
        int(fields["NumNodes"].partition("-")[0]),
        frozenset(fields["Partition"].split(",")),
        frozenset(re.findall(r"[^\s&|,()\[\]*]+", _unless_null(fields["Features"]))),
        _unless_null(fields.get("Reservation", "")),
    )


def job_fields(job_id: str, patience: float | None = None) -> dict[str, str]:
    """Return all that the controller says of a job, by Slurm's names.

    Raises:
        ValueError: it does not answer; with Slurm's words.
        subprocess.TimeoutExpired: it has not answered after so many seconds of patience.
    """
    return read_fields(_scontrol("--oneliner", "show", "job", job_id, patience=patience))


def may_go_on(job: Job) -> bool:
    """Return whether a job whose batch script still runs was neither cancelled nor requeued by Slurm itself."""
    return job.state == "RUNNING" or job.why == "TimeLimit"


def lost_nodes(job: Job) -> list[str]:
    """Return the nodes of a running job that Slurm calls down, or on which it cannot start a step.

    Where most of several nodes are reached and refuse the step, it is not the nodes.
    """
    failed = dict(LAUNCH_FAILED.findall(_ask(job)))
    states = {fields["NodeName"]: fields["State"] for fields in _all_nodes()}
    lost = {node for node in job.nodes if DOWN.search(states.get(node, "")) or NOT_REACHED.search(failed.get(node, ""))}
    refusing = failed.keys() - lost
    if may_be_at_fault(len(refusing), job.nodes):
        lost |= refusing
    return [node for node in job.nodes if node in lost]


def may_be_at_fault(accused: int, nodes: Sequence[str]) -> bool:
    """Return whether so many of a job's nodes can be to blame: if they are most of several, it is not the nodes."""
    return accused <= max(1, len(nodes) // 2)


def sparable(job: Job, faulty: Iterable[str]) -> list[str]:
    """Return the nodes of a job that its next attempt can do without: as many as leave it enough, the first ones first.

    Only nodes count that have the same devices as one of the job's, and those of the features it asks for that one of
    the job's has, since what it asks for is not compared in full.
    """
    faulty = list(faulty)
    if not faulty:
        return []
    found = _all_nodes()
    like = [(each.get("Gres"), job.features & _features(each)) for each in found if each["NodeName"] in job.nodes]
    reserved = _reserved(job)
    able = {
        each["NodeName"]
        for each in found
        if any(
            each.get("Gres") == devices and features <= _features(each) and bool(features) == bool(job.features)
            for devices, features in like
        )
        and _may_run(job, each, reserved)
    }
    able -= {*job.excluded}
    spared: list[str] = []
    for node in faulty:
        if len(able - {*spared, node}) >= job.count:
            spared.append(node)
    return spared


def requeue(job: Job) -> None:
    """Put a job back into the queue. Raises ValueError if Slurm refuses.

    Slurm sends SIGTERM to whoever does that to the job that he is in: start with it ignored.
    """
    _scontrol("requeue", job.id)


def exclude(job: Job, without: Iterable[str]) -> None:
    """Let the next attempt of a job do without some nodes, and those that it did without before.

    Slurm does so for a pending job alone: `requeue` it first. Raises ValueError if Slurm refuses.
    """
    if excluded := sorted({*job.excluded, *without}):
        _scontrol("update", f"JobId={job.id}", f"ExcNodeList={','.join(excluded)}")


def _reserved(job: Job) -> set[str] | None:
    """Return the nodes of the reservations that the job may run in; None where it asks for none."""
    if not job.reservation:
        return None
    found: set[str] = set()
    for name in job.reservation.split(","):
        with suppress(ValueError):  # it is over, or not ours to see
            found |= {*names_in(read_fields(_scontrol("--oneliner", "show", "reservation", name)).get("Nodes", ""))}
    return found


def _may_run(job: Job, node: Mapping[str, str], reserved: set[str] | None) -> bool:
    """Return whether a node is up, and where the job may run."""
    return (
        not UNUSABLE_NODE.search(node["State"])
        and ("RESERVED" not in node["State"] if reserved is None else node["NodeName"] in reserved)
        and bool(job.partitions & set(node.get("Partitions", "").split(",")))
    )


def _features(node: Mapping[str, str]) -> frozenset[str]:
    return frozenset(node.get("ActiveFeatures", "").split(","))


def _ask(job: Job) -> str:
    """Return what srun says when it starts a step that does nothing on every node of the job."""
    # What GPUs, memory and cores the job's steps take is in variables; this one takes none, or would wait for theirs
    environment = {
        key: value for key, value in os.environ.items() if not re.match("SLURM_(GPU|MEM|TRES|CPU_BIND)", key)
    }
    shape = (f"--nodes={len(job.nodes)}", f"--ntasks={len(job.nodes)}", "--ntasks-per-node=1", "--cpus-per-task=1")
    command = ("srun", f"--jobid={job.number}", "--overlap", "--mem=0", "--gres=none", *shape, "true")
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        return (error.stderr or b"").decode(errors="replace")
    return done.stderr


def _all_nodes() -> list[dict[str, str]]:
    return [read_fields(line) for line in _scontrol("--oneliner", "show", "node").splitlines() if line]


def read_fields(line: str) -> dict[str, str]:
    """Return key -> value of a line of scontrol; of a value with blanks the first word."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _unless_null(value: str) -> str:
    return "" if value in NOBODY else value


def _scontrol(*arguments: str, patience: float | None = None) -> str:
    """Return what scontrol prints; without a limit of patience, ask again for a minute where no controller is reached.

    Raises:
        OSError: there is no scontrol.
        ValueError: it fails; with its words.
        subprocess.TimeoutExpired: it has not answered within the patience.
    """
    pauses = iter(PAUSES if patience is None else ())
    while True:
        done = subprocess.run(("scontrol", *arguments), capture_output=True, text=True, timeout=patience, check=False)
        if not done.returncode:
            return done.stdout
        pause = next(pauses, None) if UNREACHED.search(done.stderr) else None
        if pause is None:
            raise ValueError(f"scontrol {' '.join(arguments)}: {done.stderr.strip()}")
        time.sleep(pause)
