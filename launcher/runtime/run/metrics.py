"""Write numbers for people and programs: metrics.jsonl, trackers, console lines, and what the machine is."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from pathlib import Path
from typing import Any

import psutil
import torch

from plumbline.launcher.runtime.run.interventions import read_interventions
from plumbline.launcher.runtime.run.lines import Lines
from plumbline.launcher.runtime.run.progress import StepProgress
from plumbline.launcher.runtime.system.files import read_json_lines, read_key, write_json_lines
from plumbline.launcher.runtime.system.installation import ROOT, is_checkout
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.world import World
from plumbline.launcher.runtime.trackers.feed import Feed, History, finish

REPORTED = ("loss", "grad_norm")
"""Numbers of a step that metrics.jsonl and the chain both have."""


class MetricsLog:
    """Write metrics.jsonl and console lines, and hand the numbers to trackers, on the main rank.

    Opened at the step that training (re)starts from: what an earlier process wrote after its last checkpoint is
    dropped, so the file always reads as if the run had never been interrupted.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        total_steps: int,
        feeds: Callable[[History], Sequence[Feed]] = lambda _history: (),
        work_before: Callable[[int], int] = lambda step: step,
        interval: int = 1,
        evaluates: bool = True,
    ) -> None:
        """Open the files.

        Args:
            folder: of the run.
            step: that training (re)starts from.
            total_steps: of the run.
            feeds: opens the trackers, given what the file holds.
            work_before: work of the first so many steps, in any unit: where steps differ in size, time left does not
                go by their number.
            interval: steps between lines.
            evaluates: whether the evaluation at `step` is made now; else the one that is there stays.
        """
        self.path = folder / "metrics.jsonl"
        history = _truncate(self.path, step, evaluates)
        last = history.kept[-1]["step"] if history.kept else None
        if last is not None and step - last >= max(interval, _interval_before(history.kept)):
            LOG.warning(f"{self.path} has no line of steps {last + 1} to {step}: they were lost with their process")
        self._lines = Lines(self.path)
        self._feeds = feeds(history)
        self._progress = StepProgress(step, total_steps, work_before)

    def write(self, record: dict[str, Any]) -> None:
        """Write one object as one line; trackers get its numbers, under their keys."""
        self._lines.add(json.dumps(record))
        for feed in self._feeds:
            feed.put(record)

    def progress(self, record: dict[str, Any]) -> None:
        """Show a training step to who watches."""
        self._progress.update(record)

    def close(self) -> None:
        """Flush everything to disk, and wait a while for trackers."""
        self._progress.close()
        self._lines.close()
        finish(self._feeds)


def _truncate(path: Path, step: int, evaluates: bool) -> History:
    """Keep what belongs to a run that stands at `step`: its steps up to there, and evaluations before there.

    Returns what is kept and what is not, in order.

    The evaluation at `step` itself comes after the checkpoint of `step`, and is dropped if it is made again: that of a
    last step is not, once the run is longer. A step writes its losses and, in a line of their own, its diagnostics.
    """
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    if path.exists():
        for its, record in read_metrics(path):
            of_a_step = any(not key.startswith("eval/") for key in record.keys() - {"step", "tokens"})
            stays = its < step or (its == step and (of_a_step or not evaluates))
            (kept if stays else dropped).append(record)
        write_json_lines(path, kept)
    return History(kept, dropped, step, [made.back_to for made in read_interventions(path.parent)])


def _interval_before(records: Sequence[dict[str, Any]]) -> int:
    """Return how many steps lie between the last two lines of losses, which an earlier start may have set apart."""
    steps = [0, *(record["step"] for record in records if "loss" in record)]
    return int(steps[-1] - steps[-2]) if len(steps) > 1 else 0


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step of each line of metrics.jsonl, and all that it holds.

    Raises:
        DamagedFileError: a line has no step, or a loss or a norm that is no number; names the line and the value.
        OSError: the file cannot be read.
    """
    for number, record in read_json_lines(path):
        place = f"{path}, line {number}"
        for key in (key for key in REPORTED if key in record):
            read_key(record, key, Real, place)  # type: ignore[type-abstract]
        yield read_key(record, "step", int, place), record


def environment(world: World) -> dict[str, Any]:
    """Return what a result may depend on: versions, code, hardware, command line."""
    packages = ("torch", "deepspeed", "transformers", "tokenizers", "numpy")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": [word for word in sys.argv if not word.startswith("--local_rank=")],  # of the DeepSpeed launcher
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "world_size": world.size,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    if not is_checkout():  # or git would look for one around the environment, which is the user's
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
