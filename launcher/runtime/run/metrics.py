"""Write numbers for people and programs: metrics.jsonl, TensorBoard, console lines, and what the machine is."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from plumbline.launcher.runtime.run.event_file import EventFile
from plumbline.launcher.runtime.run.lines import Lines
from plumbline.launcher.runtime.run.progress import StepProgress
from plumbline.launcher.runtime.system.files import read_json_lines, read_key, write_json_lines
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.world import World


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
        last = _truncate(self.path, step)
        if last is not None and step - last >= interval:
            LOG.warning(f"{self.path} has no line of steps {last + 1} to {step}: they were lost with their process")
        self._lines = Lines(self.path)
        self._board: EventFile | None = None
        with self._without_board_if_need_be():
            self._board = EventFile(folder / "tensorboard", step + 1) if tensorboard else None
        self._has_layout = False
        self._progress = StepProgress(step, total_steps, work_before)

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
        """Show a training step to who watches."""
        self._progress.update(record)

    def close(self) -> None:
        """Flush everything to disk."""
        self._progress.close()
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
