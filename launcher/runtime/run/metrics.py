"""Write numbers for people and programs: metrics.jsonl, TensorBoard, console lines, and what the machine is."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from plumbline.launcher.runtime.run.event_file import EventFile
from plumbline.launcher.runtime.run.lines import Lines
from plumbline.launcher.runtime.system.cli import duration
from plumbline.launcher.runtime.system.files import read_json_lines, read_key, write_json_lines
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.system.world import World

CONSOLE_SECONDS = 5.0  # between progress lines, so that a log of a long run stays readable


class MetricsLog:
    """Write metrics.jsonl, TensorBoard files and console lines, on the main rank.

    Opened at the step that training (re)starts from: what an earlier process wrote after its last checkpoint is
    dropped, so the file always reads as if the run had never been interrupted.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        total_steps: int,
        tensorboard: bool,
        work_before: Callable[[int], int] = lambda step: step,
        interval: int = 1,
    ) -> None:
        """Open the files.

        Args:
            folder: of the run.
            step: that training (re)starts from.
            total_steps: of the run.
            tensorboard: write TensorBoard files, too.
            work_before: work of the first so many steps, in any unit: where steps differ in size, time left does not
                go by their number.
            interval: steps between lines.
        """
        self.path = folder / "metrics.jsonl"
        self.total_steps, self.work_before = total_steps, work_before
        last = _truncate(self.path, step)
        if last is not None and step - last >= interval:
            LOG.warning(f"{self.path} has no line of steps {last + 1} to {step}: they were lost with their process")
        self._lines = Lines(self.path)
        self._board: EventFile | None = None
        with self._without_board_if_need_be():
            self._board = EventFile(folder / "tensorboard", step + 1) if tensorboard else None
        self._has_layout = False
        self._started, self._first_step = time.monotonic(), step
        self._printed = float("-inf")

    def write(self, record: dict[str, Any]) -> None:
        """Write one object as one line; numbers also go to TensorBoard under their key."""
        self._lines.add(json.dumps(record))
        with self._without_board_if_need_be():
            if self._board is not None:
                numbers = {
                    key if "/" in key else f"train/{key}": value
                    for key, value in record.items()
                    if isinstance(value, (int, float)) and key != "step"
                }
                self._board.add(record["step"], numbers)

    def write_diagnostics(self, record: dict[str, Any]) -> None:
        """Write as `write` does; in TensorBoard each quantity also gets a chart with a line for each block."""
        if self._board is not None and not self._has_layout:
            charts: dict[str, dict[str, Any]] = {}
            for key in record.keys() - {"step", "tokens"}:
                kind, quantity, *place = key.split("/")
                if place:
                    charts.setdefault(kind, {})[f"{kind}/{quantity}"] = ["Multiline", [f"{kind}/{quantity}/"]]
            with self._without_board_if_need_be():
                self._board.add_layout({kind: dict(sorted(charts[kind].items())) for kind in sorted(charts)})
            self._has_layout = True
        self.write(record)

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
        """Flush everything to disk."""
        self._lines.close()
        with self._without_board_if_need_be():
            if self._board is not None:
                self._board.close()

    @contextmanager
    def _without_board_if_need_be(self) -> Iterator[None]:
        """Go on without TensorBoard once it cannot be written: metrics.jsonl has all numbers."""
        try:
            yield
        except OSError as error:
            LOG.warning(f"{self.path.parent / 'tensorboard'} cannot be written ({error}): no more until the next start")
            self._board = None


def _truncate(path: Path, step: int) -> int | None:
    """Keep what belongs to a run that stands at `step`: its steps up to there, and evaluations before there.

    Returns the last step of which there is a line.

    The evaluation at `step` itself comes after the checkpoint of `step` and will be done again. A step writes its
    losses and, in a line of their own, its diagnostics.
    """
    if not path.exists():
        return None
    kept = []
    for number, record in read_json_lines(path):
        of_a_step = any(not key.startswith("eval/") for key in record.keys() - {"step", "tokens"})
        its = read_key(record, "step", int, f"{path}, line {number}")
        if its < step or (its == step and of_a_step):
            kept.append(record)
    write_json_lines(path, kept)
    return max((record["step"] for record in kept), default=None)


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
