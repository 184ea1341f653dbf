"""Decide whether a Slurm job that ended is worth another attempt.

An attempt is fruitless if it ended, however it did, without a newer checkpoint than it began with. Requested stops and
preemptions save one, so a healthy run may be stopped as often as the cluster likes; one that crashes at the same place
ends in somebody's hands. How many fruitless attempts there have been in a row is kept in a file for each job, which
survives that Slurm kills the job's processes.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from plumbline.launcher.runtime.system.exit_codes import BROKEN, COMPLETE, UNUSABLE
from plumbline.launcher.runtime.system.files import write_json

VARIABLE = "PLUMBLINE_FRUITLESS_ATTEMPTS"
FINAL = {
    COMPLETE: "complete",
    UNUSABLE: "configuration, data or run folder cannot be used",
    BROKEN: "training broke down",
}
"""Exit codes after which another attempt would end alike, and what they say."""


@dataclass(frozen=True)
class Attempt:
    """Say how an attempt of a job ended."""

    code: int
    """What srun returned."""
    before: int
    """Step of the newest checkpoint when the attempt began, 0 without one."""
    after: int
    """Step of the newest checkpoint now."""


@dataclass(frozen=True)
class Decision:
    """Say whether the job goes back into the queue, and why."""

    requeue: bool
    reason: str


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
        tally: file of the job that counts fruitless attempts in a row.
        limit: how many of them end the job.

    Raises:
        OSError: the count cannot be kept. Without it nothing would end a job that fails for ever.
    """
    if attempt.code in FINAL:
        return Decision(False, f"exit code {attempt.code}, {FINAL[attempt.code]}")
    if attempt.after > attempt.before:
        tally.unlink(missing_ok=True)
        progress = f"the newest checkpoint went from step {attempt.before} to {attempt.after}"
        return Decision(True, f"exit code {attempt.code}, {progress}")
    fruitless = 1 + _fruitless_before(attempt, tally)
    tally.parent.mkdir(parents=True, exist_ok=True)
    write_json(tally, {"step": attempt.after, "fruitless": fruitless})
    reason = (
        f"exit code {attempt.code}, no checkpoint after step {attempt.after}, fruitless attempt {fruitless} of {limit}"
    )
    return Decision(fruitless < limit, f"{reason} in a row ({VARIABLE})")


def _fruitless_before(attempt: Attempt, tally: Path) -> int:
    """Return how many attempts in a row have ended where this one began.

    An attempt that Slurm itself requeued is not in the tally; where it saved a checkpoint, the step tells.
    """
    if not tally.exists():
        return 0
    kept = json.loads(tally.read_text(encoding="utf-8"))
    return int(kept["fruitless"]) if kept["step"] == attempt.before else 0
