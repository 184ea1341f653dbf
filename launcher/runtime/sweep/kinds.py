"""List the kinds of sweeps, each of which turns results into a summary, lines to print, and a figure.

A new kind needs a module here and a line in KINDS and, if it has settings, a field of its name in SweepConfig.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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
from plumbline.launcher.runtime.train.train import train


class Summary(Protocol):
    """Define the interface of a kind's summary, which is its own dataclass."""

    def to_json(self) -> dict[str, Any]:
        """Return the plain values that summary.json holds under the kind's name."""


S = TypeVar("S", bound=Summary)


@dataclass(frozen=True)
class Kind(Generic[S]):
    """Define how a sweep of this kind is checked, run and evaluated. `settings` is the kind's block, or None."""

    check: Callable[[Any, Sequence[Result]], None]
    """(settings, results before anything ran): raises ValueError if the cells cannot be summarized."""
    summarize: Callable[[Any, Sequence[Result]], S]
    """(settings, results so far) -> the summary."""
    lines: Callable[[S], Iterator[str]]
    """The summary as text."""
    plot: Callable[[S, Path], None] | None = None
    """Draws the summary into a PNG file."""
    run: Run = train
    """What a worker does with a cell: it writes result.json and returns True, or False if it was asked to stop."""
    whole_runs: bool = True
    """Whether a cell is a whole training run: its warm-up and decay fit into it, and other kinds may share it."""


KINDS: dict[str, Kind[Any]] = {
    "grid": Kind(grid.check, grid.summarize, grid.lines),
    "comparison": Kind(comparison.check, comparison.summarize, comparison.lines, comparison_plot.plot),
    "lr_transfer": Kind(lr_transfer.check, lr_transfer.summarize, lr_transfer.lines, lr_transfer_plot.plot),
    "coordinate_check": Kind(
        coordinate_check.check,
        coordinate_check.summarize,
        coordinate_check.lines,
        coordinate_check_plot.plot,
        coordinate_check.run,
        whole_runs=False,
    ),
}
