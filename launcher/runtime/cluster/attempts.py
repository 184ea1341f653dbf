"""Decide whether a Slurm job that ended is worth another attempt.

An attempt is fruitless if it ended without a newer checkpoint than it began with, for whatever reason but a preemption,
unless it went back to an older one, which `guards.max_rollbacks` limits. Requested stops save one, so a healthy run may
be stopped any number of times, but a run that always crashes at the same place ends, and a person has to look. The
number of fruitless attempts in a row is kept in a file beside the work, which survives when Slurm kills the job's
processes, and is shared by all jobs of a chain. A new submission resets the count.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from plumbline.data.damage import DamagedFileError, read_object
from plumbline.data.disk import AWAY, is_there
from plumbline.launcher.runtime.cluster.launch import job_id, restart_count
from plumbline.launcher.runtime.cluster.nodes import PAUSES, may_be_at_fault
from plumbline.launcher.runtime.system.exit_codes import BROKEN, COMPLETE, ELSEWHERE, UNUSABLE
from plumbline.launcher.runtime.system.files import read_key, write_json
from plumbline.launcher.runtime.system.log import LOG

VARIABLE = "PLUMBLINE_FRUITLESS_ATTEMPTS"
TALLY = "attempts"
"""Prefix of the names of tally files."""
ACCUSED = "accused"
"""Folder of accusations against nodes, one file per node."""
WRONG = "computes wrong numbers"
LACKING = "lacks GPUs"
BROKEN_GPU = "has a broken GPU"
UNFIT = "is unfit to start on"
FROZEN = "is frozen"
FINAL = {
    COMPLETE: "complete",
    UNUSABLE: "configuration, data or run folder cannot be used",
    BROKEN: "training broke down",
    ELSEWHERE: "others are training what is left of its share",
}
"""Exit codes after which another attempt would end the same way, and their meaning."""
Result = TypeVar("Result")
Progress = tuple[int, ...]
"""How much of a job's work is saved, which grows over time. For a run: (step of its newest checkpoint,); for a sweep:
(finished runs, sum of the steps of the newest checkpoints of the others)."""


def describe(progress: Progress) -> str:
    """Return a description of how much is saved."""
    if len(progress) == 1:
        return f"step {progress[0]}"
    return f"{progress[0]} finished runs and {progress[1]} steps of others"


@dataclass(frozen=True)
class EndedAttempt:
    """Describe how an attempt of a job ended."""

    code: int
    """Exit code of srun."""
    before: Progress
    """What was saved when the attempt began."""
    after: Progress
    """What is saved now."""
    rolled_back: bool = False
    """Whether less is saved now because the run went back to before the checkpoint that the attempt began with."""
    preempted: bool = False
    """Whether Slurm wanted its nodes for another job."""


@dataclass(frozen=True)
class Decision:
    """Hold whether the job is requeued, and why."""

    requeue: bool
    reason: str


def once_the_disk_is_back(action: Callable[[], Result]) -> Result:
    """Return what `action` returns; retry it for a minute while the file system does not respond.

    Raises:
        OSError: it did not respond within that time, or refused.
    """
    for pause in PAUSES:
        try:
            return action()
        except OSError as error:
            if error.errno not in AWAY:
                raise
            time.sleep(pause)
    return action()


def read_limit() -> int:
    """Return the number of fruitless attempts in a row that ends a job.

    Raises:
        ValueError: the variable is not a whole number of at least 1.
    """
    text = os.environ.get(VARIABLE) or "2"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{VARIABLE} is {text}: give the number of fruitless attempts in a row that end a job, 1 or more"
        )
    return int(text)


def decide(attempt: EndedAttempt, tally: Path, limit: int) -> Decision:
    """Decide what follows the attempt that just ended, and count it.

    Args:
        attempt: how it ended.
        tally: file that counts fruitless attempts at this work in a row.
        limit: number of them that ends the job.

    Raises:
        OSError: the count cannot be stored. Without it nothing would end a job that always fails.
    """
    if attempt.code in FINAL:
        return Decision(False, f"exit code {attempt.code}, {FINAL[attempt.code]}")
    if attempt.after > attempt.before or attempt.rolled_back:
        tally.unlink(missing_ok=True)
        progress = f"what is saved went from {describe(attempt.before)} to {describe(attempt.after)}"
        progress += ", by a rollback" if attempt.rolled_back else ""
        return Decision(True, f"exit code {attempt.code}, {progress}")
    if attempt.preempted:
        return Decision(True, f"exit code {attempt.code} of a job that Slurm preempts")
    fruitless = 1 + _fruitless_before(attempt, tally)
    tally.parent.mkdir(parents=True, exist_ok=True)
    write_json(tally, {"saved": attempt.after, "fruitless": fruitless, "job": job_id(), "restart": restart_count()})
    reason = f"exit code {attempt.code}, nothing saved after {describe(attempt.after)}"
    return Decision(fruitless < limit, f"{reason}, fruitless attempt {fruitless} of {limit} in a row ({VARIABLE})")


def _fruitless_before(attempt: EndedAttempt, tally: Path) -> int:
    """Return how many attempts in a row ended where this one began.

    An attempt that Slurm itself requeued is not in the tally; if it saved a checkpoint, the saved progress shows it.
    This attempt is already in the tally if the disk became unavailable while it was being counted.
    """
    if not is_there(tally):
        return 0
    try:
        kept = read_object(tally)
        saved, fruitless = read_key(kept, "saved", list, tally), read_key(kept, "fruitless", int, tally)
    except DamagedFileError as error:
        LOG.warning(f"{error}; fruitless attempts are counted anew")
        return 0
    counted = job_id() is not None and (kept.get("job"), kept.get("restart")) == (job_id(), restart_count())
    return fruitless - int(counted) if tuple(saved) == attempt.before else 0


def accuse(folder: Path, nodes: Iterable[str], fault: str) -> None:
    """Record for requeue.py, in a run folder, a fault of nodes in this attempt of a job.

    Several ranks may do so at once.
    """
    for node in nodes:
        file = folder / ACCUSED / f"{node}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"job": job_id(), "restart": restart_count(), "fault": fault})


def accused(folder: Path, nodes: Sequence[str]) -> dict[str, str]:
    """Return name -> fault of the job's nodes that ranks of this attempt have accused.

    If they are most of several nodes, the nodes are not the cause, and none is returned.
    """
    found = {}
    for file in folder.glob(f"{ACCUSED}/*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a hint, without which the job can continue too
            word = json.loads(file.read_text(encoding="utf-8"))
            if file.stem in nodes and (word["job"], word["restart"]) == (job_id(), restart_count()):
                found[file.stem] = word["fault"]
    return found if may_be_at_fault(len(found), nodes) else {}
