"""List what a sweep can be for: each kind turns results into a summary, lines to print, and a figure.

A new kind is a module here and a line in KINDS; if it has settings, also a field of its name in SweepConfig.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.sweep import (
    comparison,
    comparison_plot,
    coordinate_check,
    coordinate_check_plot,
    grid,
    lr_transfer,
    lr_transfer_plot,
)
from plumbline.launcher.runtime.sweep.result import Result
from plumbline.launcher.runtime.sweep.worker import Run
from plumbline.launcher.runtime.train.loop import train

Summary = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Say how a sweep of this kind is checked, run and read. `settings` is the block of the kind's name, or None."""

    check: Callable[[Any, Sequence[Result]], None]
    """(settings, results before anything ran): raises ValueError if these cells cannot be summarized."""
    summarize: Callable[[Any, Sequence[Result]], Summary]
    """(settings, results so far) -> what summary.json holds under the kind's name."""
    lines: Callable[[Summary], Iterator[str]]
    """The summary as text."""
    plot: Callable[[Summary, Path], None] | None = None
    """Draws the summary into a PNG file."""
    run: Run = train
    """What a worker does with a cell: writes result.json and returns True, or False if it was asked to stop."""


KINDS = {
    "grid": Kind(grid.check, grid.summarize, grid.lines),
    "comparison": Kind(comparison.check, comparison.summarize, comparison.lines, comparison_plot.plot),
    "lr_transfer": Kind(lr_transfer.check, lr_transfer.summarize, lr_transfer.lines, lr_transfer_plot.plot),
    "coordinate_check": Kind(
        coordinate_check.check,
        coordinate_check.summarize,
        coordinate_check.lines,
        coordinate_check_plot.plot,
        coordinate_check.run,
    ),
}
