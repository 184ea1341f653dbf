"""Decide whether a Slurm job that ended is worth another attempt.

An attempt is fruitless if it ended, however it did, without a newer checkpoint than it began with. Requested stops and
preemptions save one, so a healthy run may be stopped as often as the cluster likes; one that crashes at the same place
ends in somebody's hands. How many fruitless attempts there have been in a row is kept in a file beside the work, which
survives that Slurm kills the job's processes, and is the same for all jobs of a chain. Who submits a job has looked, so
that the count begins anew.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from plumbline.launcher.runtime.system.exit_codes import BROKEN, COMPLETE, UNUSABLE
from plumbline.launcher.runtime.system.files import write_json
from plumbline.launcher.runtime.system.launch import job_id, restart_count
from plumbline.launcher.runtime.system.nodes import PAUSES, may_be_at_fault

VARIABLE = "PLUMBLINE_FRUITLESS_ATTEMPTS"
TALLY = "attempts"
"""What names of tallies begin with."""
ACCUSED = "accused"
"""Folder of what is said against nodes, a file for each of them."""
WRONG = "computes wrong numbers"
LACKING = "lacks GPUs"
BROKEN_GPU = "has a broken GPU"
UNFIT = "is unfit to start on"
FROZEN = "is frozen"
FINAL = {
    COMPLETE: "complete",
    UNUSABLE: "configuration, data or run folder cannot be used",
    BROKEN: "training broke down",
}
"""Exit codes after which another attempt would end alike, and what they say."""


AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)
"""What a shared file system says while its server or this node's client starts again."""
Result = TypeVar("Result")
Progress = tuple[int, ...]
"""How much of a job's work is saved, of two moments the later one greater: of a run (step of its newest checkpoint,);
of a sweep (finished runs, sum of the steps of the newest checkpoints of the others)."""


def describe(progress: Progress) -> str:
    """Return in words how much is saved."""
    if len(progress) == 1:
        return f"step {progress[0]}"
    return f"{progress[0]} finished runs and {progress[1]} steps of others"


@dataclass(frozen=True)
class Attempt:
    """Say how an attempt of a job ended."""

    code: int
    """What srun returned."""
    before: Progress
    """What was saved when the attempt began."""
    after: Progress
    """What is saved now."""


@dataclass(frozen=True)
class Decision:
    """Say whether the job goes back into the queue, and why."""

    requeue: bool
    reason: str


def once_the_disk_is_back(action: Callable[[], Result]) -> Result:
    """Return what `action` returns; call it again for a minute while the file system does not answer.

    Raises:
        OSError: it has not answered for so long, or has, and does not let us.
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
    """Return how many fruitless attempts in a row end a job.

    Raises:
        ValueError: the variable is not a whole number of at least 1.
    """
    text = os.environ.get(VARIABLE) or "2"
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"{VARIABLE} is {text}: give the number of fruitless attempts in a row that end a job, 1 or more"
        )
    return int(text)


def decide(attempt: Attempt, tally: Path, limit: int) -> Decision:
    """Decide about the attempt that just ended, and count it.

    Args:
        attempt: how it ended.
        tally: file that counts fruitless attempts at this work in a row.
        limit: how many of them end the job.

    Raises:
        OSError: the count cannot be kept. Without it nothing would end a job that fails for ever.
    """
    if attempt.code in FINAL:
        return Decision(False, f"exit code {attempt.code}, {FINAL[attempt.code]}")
    if attempt.after > attempt.before:
        tally.unlink(missing_ok=True)
        progress = f"what is saved went from {describe(attempt.before)} to {describe(attempt.after)}"
        return Decision(True, f"exit code {attempt.code}, {progress}")
    fruitless = 1 + _fruitless_before(attempt, tally)
    tally.parent.mkdir(parents=True, exist_ok=True)
    write_json(tally, {"saved": attempt.after, "fruitless": fruitless, "job": job_id(), "restart": restart_count()})
    reason = f"exit code {attempt.code}, nothing saved after {describe(attempt.after)}"
    return Decision(fruitless < limit, f"{reason}, fruitless attempt {fruitless} of {limit} in a row ({VARIABLE})")


def _fruitless_before(attempt: Attempt, tally: Path) -> int:
    """Return how many attempts in a row have ended where this one began.

    An attempt that Slurm itself requeued is not in the tally; where it saved a checkpoint, what is saved tells. This
    one is there already if the disk was away in the middle of counting it.
    """
    if not tally.exists():
        return 0
    kept = json.loads(tally.read_text(encoding="utf-8"))
    counted = job_id() is not None and (kept.get("job"), kept.get("restart")) == (job_id(), restart_count())
    return int(kept["fruitless"]) - int(counted) if tuple(kept["saved"]) == attempt.before else 0


def accuse(folder: Path, nodes: Iterable[str], fault: str) -> None:
    """Leave word for requeue.py, in a folder of a run, what is wrong with nodes of this attempt of a job.

    Several ranks may do so at once.
    """
    for node in nodes:
        file = folder / ACCUSED / f"{node}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"job": job_id(), "restart": restart_count(), "fault": fault})


def accused(folder: Path, nodes: Sequence[str]) -> dict[str, str]:
    """Return name -> fault of the nodes of a job that ranks of this attempt have accused.

    Where that is most of several nodes, it is not the nodes, and none is returned.
    """
    found = {}
    for file in folder.glob(f"{ACCUSED}/*.json"):
        with suppress(OSError, ValueError, KeyError):  # a hint, without which the job goes on as well
            word = json.loads(file.read_text(encoding="utf-8"))
            if file.stem in nodes and (word["job"], word["restart"]) == (job_id(), restart_count()):
                found[file.stem] = word["fault"]
    return found if may_be_at_fault(len(found), nodes) else {}
