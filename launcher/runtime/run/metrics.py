"""Write numbers for people and programs: metrics.jsonl, trackers, console lines, and what the machine is."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from plumbline.launcher.runtime.run.lines import Lines
from plumbline.launcher.runtime.system.cli import duration
from plumbline.launcher.runtime.system.files import read_json_lines, write_json_lines
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.system.world import World
from plumbline.launcher.runtime.trackers.feed import Feed, History, finish

CONSOLE_SECONDS = 5.0  # between progress lines, so that a log of a long run stays readable


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
        """
        self.path = folder / "metrics.jsonl"
        self.total_steps, self.work_before = total_steps, work_before
        history = _truncate(self.path, step)
        last = history.kept[-1]["step"] if history.kept else None
        if last is not None and step - last >= interval:
            LOG.warning(f"{self.path} has no line of steps {last + 1} to {step}: they were lost with their process")
        self._lines = Lines(self.path)
        self._feeds = feeds(history)
        self._started, self._first_step = time.monotonic(), step
        self._printed = float("-inf")

    def write(self, record: dict[str, Any]) -> None:
        """Write one object as one line; trackers get its numbers, under their keys."""
        self._lines.add(json.dumps(record))
        for feed in self._feeds:
            feed.put(record)

    def progress(self, record: dict[str, Any]) -> None:
        """Log a line for a training step, at most every few seconds (the first and the last always)."""
        step, now = record["step"], time.monotonic()
        if now - self._printed < CONSOLE_SECONDS and step != self.total_steps:
            return
        self._printed = now
        first, done, whole = (self.work_before(step) for step in (self._first_step, step, self.total_steps))
        seconds_left = (now - self._started) / max(1, done - first) * (whole - done)
        mfu = ""
        if "mfu" in record:
            mfu = "  mfu unknown, peak too low" if record["mfu"] is None else f"  mfu {record['mfu']:.1%}"
        TRAINING.info(
            f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {record['loss']:.4f}  "
            f"lr {record['lr']:.2e}  grad {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s"
            f"{mfu}  eta {duration(seconds_left)}"
        )

    def close(self) -> None:
        """Flush everything to disk, and wait a while for trackers."""
        self._lines.close()
        finish(self._feeds)


def _truncate(path: Path, step: int) -> History:
    """Keep what belongs to a run that stands at `step`: its steps up to there, and evaluations before there.

    Returns what is kept and what is not, in order.

    The evaluation at `step` itself comes after the checkpoint of `step` and will be done again. A step writes its
    losses and, in a line of their own, its diagnostics.
    """
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    if path.exists():
        for _, record in read_json_lines(path):
            of_a_step = any(not key.startswith("eval/") for key in record.keys() - {"step", "tokens"})
            stays = record["step"] < step or (record["step"] == step and of_a_step)
            (kept if stays else dropped).append(record)
        write_json_lines(path, kept)
    return History(kept, dropped, step)


def environment(world: World) -> dict[str, Any]:
    """Return what a result may depend on: versions, code, hardware, command line."""
    packages = ("torch", "deepspeed", "transformers", "tokenizers", "numpy")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
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
    root = Path(__file__).resolve().parents[3]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
