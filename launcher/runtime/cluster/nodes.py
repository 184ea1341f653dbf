"""Name the nodes of a job, find those that do not answer, and exclude them from its next attempt.

Slurm counts a node as up for SlurmdTimeout (300 s by default) after its last response, while a job ends within
`srun --wait` of the loss of a rank. So the nodes are probed by a job step that does nothing.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

DOWN = re.compile(r"\bDOWN\b|\bFAIL\b|NOT_RESPONDING|\*")
"""Marks in Slurm's State of a node that is lost: DOWN+DRAIN, ALLOCATED*, MIXED+NOT_RESPONDING."""
UNUSABLE_NODE = re.compile(rf"{DOWN.pattern}|DRAIN|MAINT")
"""Marks of a node on which no job starts."""
LAUNCH_FAILED = re.compile(r"failed on node ([^\s:]+):(.*)")
"""The node and the reason: it cannot be reached, or it refuses the request."""
NOT_REACHED = re.compile("ommunication|onnection|imed out|Zero Bytes|receive failure|No route|not responding")
UNREACHED = re.compile("Unable to contact slurm controller|Socket timed out")
"""Messages of Slurm's commands while the controller restarts or is overloaded."""
PAUSES = (10.0,) * 6
"""Seconds between attempts to reach the controller."""
NOBODY = ("", "(null)")
ASK_SECONDS = 120
"""Seconds for all nodes to start a step. Slurm's own timeouts give up on a lost node within this time."""


@dataclass(frozen=True)
class Job:
    """Describe a job as the controller knows it."""

    id: str
    """ARRAY_TASK for a task of an array, because the last task's own number is also the array's."""
    number: str
    state: str
    """RUNNING while the batch script runs undisturbed; COMPLETING also while Slurm ends it."""
    why: str
    """Reason for the state, for example TimeLimit."""
    nodes: tuple[str, ...]
    excluded: tuple[str, ...]
    count: int
    """Number of nodes that it requests."""
    partitions: frozenset[str]
    features: frozenset[str]
    """Words of --constraint, whatever the operators between them, including node counts."""
    reservation: str = ""
    """Reservation to whose nodes it is limited; if empty, it gets nodes that are not reserved."""
    preempted: bool = False
    """Whether Slurm has begun to preempt this attempt, and has given it GraceTime."""


def names_in(nodes: str) -> tuple[str, ...]:
    """Return the names in one of Slurm's node lists: n[1-2] is n1 and n2.

    Raises:
        OSError: there is no scontrol here.
        ValueError: it is not such a list.
    """
    return () if not _unless_null(nodes) else tuple(_scontrol("show", "hostnames", nodes).split())


def first_address(nodes: str) -> str:
    """Return Slurm's address of the first node in a list; node names need not resolve.

    It is the name if Slurm hides nodes from its users (PrivateData=nodes), as in slurm/pretrain.sbatch.

    Raises:
        OSError, ValueError: likewise.
        IndexError: the list is empty.
    """
    first = names_in(nodes)[0]
    try:
        return fields_of("node", first)["NodeAddr"]
    except (ValueError, KeyError):
        return first


def node_name() -> str:
    """Return the name of this node from Slurm, or else from the system."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_job() -> str | None:
    """Return the unambiguous id of this process's job for Slurm's commands, or None outside of a job.

    The number of an array's last task is that of the array, which stands for all its tasks. Other tasks have one of
    their own; a job that was submitted from within a task has another one still, beside that task's variables.
    """
    number, array, task = (os.environ.get(f"SLURM_{name}_ID") for name in ("JOB", "ARRAY_JOB", "ARRAY_TASK"))
    return number if array is None or task is None or array != number else f"{array}_{task}"


def read_job(job_id: str) -> Job:
    """Return a job from the controller. Raises ValueError with Slurm's message if it does not answer."""
    fields = fields_of("job", job_id)
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
        _is_preempted(fields),
    )


def _is_preempted(fields: Mapping[str, str]) -> bool:
    """Return whether Slurm has begun to preempt a job since it started."""
    try:
        preempted, started = (datetime.fromisoformat(fields[name]) for name in ("PreemptTime", "StartTime"))
    except (KeyError, ValueError):  # None
        return False
    return preempted >= started


def fields_of(kind: str, name: str, patience: float | None = None) -> dict[str, str]:
    """Return all fields of a job, node, partition or reservation from the controller, by Slurm's names.

    Raises:
        ValueError: it does not answer; with Slurm's message.
        subprocess.TimeoutExpired: it has not answered within `patience` seconds.
    """
    return read_fields(_scontrol("--oneliner", "show", kind, name, patience=patience))


def may_go_on(job: Job) -> bool:
    """Return whether a job whose batch script still runs was neither cancelled nor requeued by Slurm itself."""
    return job.state == "RUNNING" or job.why == "TimeLimit"


def lost_nodes(job: Job) -> list[str]:
    """Return the nodes of a running job that Slurm calls down, or on which it cannot start a step.

    If most of several nodes are reached but refuse the step, the nodes are not the cause.
    """
    failed = dict(LAUNCH_FAILED.findall(_ask(job)))
    states = {fields["NodeName"]: fields["State"] for fields in _all_nodes()}
    lost = {node for node in job.nodes if DOWN.search(states.get(node, "")) or NOT_REACHED.search(failed.get(node, ""))}
    refusing = failed.keys() - lost
    if may_be_at_fault(len(refusing), job.nodes):
        lost |= refusing
    return [node for node in job.nodes if node in lost]


def may_be_at_fault(accused: int, nodes: Sequence[str]) -> bool:
    """Return whether `accused` of a job's nodes can be at fault; if most of several are, the cause is elsewhere."""
    return accused <= max(1, len(nodes) // 2)


def sparable(job: Job, faulty: Iterable[str]) -> list[str]:
    """Return the faulty nodes that a job's next attempt can do without: the first ones, as long as enough are left.

    As replacements count nodes with the same devices, and the same requested features, as one of the job's nodes, since
    the job's full request is not compared.
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
    """Requeue a job. Raises ValueError if Slurm refuses.

    Slurm sends SIGTERM to a process that requeues its own job: start it with SIGTERM ignored.
    """
    _scontrol("requeue", job.id)


def exclude(job: Job, without: Iterable[str]) -> None:
    """Exclude nodes from the next attempt of a job, in addition to those excluded before.

    Slurm allows it only for a pending job: `requeue` it first. Raises ValueError if Slurm refuses.
    """
    if excluded := sorted({*job.excluded, *without}):
        _scontrol("update", f"JobId={job.id}", f"ExcNodeList={','.join(excluded)}")


def _reserved(job: Job) -> set[str] | None:
    """Return the nodes of the reservations that the job may run in, or None if it requests none."""
    if not job.reservation:
        return None
    found: set[str] = set()
    for name in job.reservation.split(","):
        with suppress(ValueError):  # it has ended, or is not visible to us
            found |= {*names_in(fields_of("reservation", name).get("Nodes", ""))}
    return found


def _may_run(job: Job, node: Mapping[str, str], reserved: set[str] | None) -> bool:
    """Return whether a node is up and the job may run on it."""
    return (
        not UNUSABLE_NODE.search(node["State"])
        and ("RESERVED" not in node["State"] if reserved is None else node["NodeName"] in reserved)
        and bool(job.partitions & set(node.get("Partitions", "").split(",")))
    )


def _features(node: Mapping[str, str]) -> frozenset[str]:
    return frozenset(node.get("ActiveFeatures", "").split(","))


def _ask(job: Job) -> str:
    """Return the output of srun for a step that does nothing on every node of the job."""
    # Variables set the GPUs, memory and cores of the job's steps; this step takes none, or it would wait for theirs
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
    """Return key -> value from a line of scontrol; only the first word of a value with blanks."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _unless_null(value: str) -> str:
    return "" if value in NOBODY else value


def _scontrol(*arguments: str, patience: float | None = None) -> str:
    """Return the output of scontrol; without `patience`, retry for a minute if the controller cannot be reached.

    Raises:
        OSError: there is no scontrol.
        ValueError: it fails; with its message.
        subprocess.TimeoutExpired: it has not answered within `patience` seconds.
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
