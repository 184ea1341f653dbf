"""Write the numbers of a run: metrics.jsonl, trackers and console lines."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from numbers import Real
from pathlib import Path
from typing import Any

from plumbline.data.damage import DamagedFileError
from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.run.interventions import read_interventions
from plumbline.launcher.runtime.run.lines import Lines
from plumbline.launcher.runtime.run.progress import StepProgress
from plumbline.launcher.runtime.system.files import read_json_lines, read_key, write_start_anew
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.tail import Line, lines_from_end, lines_since
from plumbline.launcher.runtime.trackers.feed import Feed, History, finish

REPORTED = ("loss", "grad_norm")
"""Numbers of a step that are in both metrics.jsonl and the chain."""


class MetricsLog:
    """Write metrics.jsonl and console lines, and pass the numbers to trackers, on the main rank.

    When it is opened, lines that an earlier process wrote after its last checkpoint are removed, so the file always
    reads as if the run had never been interrupted.
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
            folder: the run folder.
            step: step from which training (re)starts.
            total_steps: number of steps of the run.
            feeds: opens the trackers, given the contents of the file.
            work_before: returns the work of the first n steps, in any unit, to estimate the time left when steps
                differ in size.
            interval: steps between lines.
            evaluates: whether the evaluation at `step` will be made now; if not, an existing one is kept.
        """
        self.path = folder / METRICS
        history = _truncate(self.path, step, evaluates)
        _tell_of_lost_lines(self.path, step, interval)
        self._lines = Lines(self.path)
        self._feeds = feeds(history)
        self._progress = StepProgress(step, total_steps, work_before)

    def write(self, record: dict[str, Any]) -> None:
        """Write one object as one line, and pass its numbers to trackers under the same keys."""
        self._lines.add(json.dumps(record))
        for feed in self._feeds:
            feed.put(record)

    def progress(self, record: dict[str, Any]) -> None:
        """Show a training step on the console."""
        self._progress.update(record)

    def close(self) -> None:
        """Write everything to disk, and wait up to a limit for trackers."""
        self._progress.close()
        self._lines.close()
        finish(self._feeds)


def _truncate(path: Path, step: int, evaluates: bool) -> History:
    """Drop the lines that training will write again when it resumes at `step`.

    Steps up to `step` and evaluations before it are kept. The evaluation at `step` follows the checkpoint of `step`,
    and is dropped if it will be made again; that of the last step will not, if the run was extended since. A step
    writes its losses and, in a separate line, its diagnostics.

    Returns:
        The lines that were kept and those that were dropped.
    """
    path.touch()
    before, lines = lines_since(path, step, partial(_step_of, path))
    kept: list[bytes] = []
    dropped: list[dict[str, Any]] = []
    for _, text, record in lines:
        its = record["step"]
        of_a_step = any(not key.startswith("eval/") for key in record.keys() - {"step", "tokens"})
        stays = its < step or (its == step and (of_a_step or not evaluates))
        if stays:
            kept.append(text + b"\n")
        else:
            dropped.append(record)
    # A new file, because an earlier attempt that is still alive may write to this one
    write_start_anew(path, before, b"".join(kept))
    returns = [made.back_to for made in read_interventions(path.parent)]
    return History(partial(_kept_since, path, path.stat().st_size), dropped, step, returns)


def _kept_since(path: Path, size: int, step: int) -> list[dict[str, Any]]:
    """Return the lines of `step` and later steps in the first `size` bytes, after which this process appends."""
    _, lines = lines_since(path, step, partial(_step_of, path), size)
    return [line.item for line in lines if line.item["step"] >= step]


def _tell_of_lost_lines(path: Path, step: int, interval: int) -> None:
    """Warn if the last lines before `step` are missing.

    The interval between lines is inferred from the last two, because an earlier start may have used another one.
    """
    records = (line.item for line in lines_from_end(path))
    newest = next(records, {"step": step})
    last = newest["step"]
    if step - last < interval:
        return
    steps = (record["step"] for record in chain([newest], records) if "loss" in record)
    later, earlier = [*islice(steps, 2), 0, 0][:2]
    if step - last >= later - earlier:
        LOG.warning(f"{path} has no line of steps {last + 1} to {step}: they were lost with their process")


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and the object of each line of metrics.jsonl.

    Raises:
        DamagedFileError: a line has no step, or its loss or norm is not a number; names the line and the value.
        OSError: the file cannot be read.
    """
    for number, record in read_json_lines(path):
        yield _checked_step(record, f"{path}, line {number}"), record


def metrics_from_end(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the same as `read_metrics`, the last line first, and read only as much of the file as is consumed."""
    return ((_step_of(path, line), line.item) for line in lines_from_end(path))


def _step_of(path: Path, line: Line) -> int:
    """Return the step of a line of metrics.jsonl that was read from the end; raises the errors of `read_metrics`."""
    try:
        return _checked_step(line.item, str(path))
    except DamagedFileError:
        for _ in read_metrics(path):  # raises an error with the line number, for whoever repairs the file
            pass
        raise


def _checked_step(record: dict[str, Any], place: str) -> int:
    for key in (key for key in REPORTED if key in record):
        read_key(record, key, Real, place)  # type: ignore[type-abstract]
    return read_key(record, "step", int, place)
