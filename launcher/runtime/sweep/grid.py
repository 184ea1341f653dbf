"""Summarize a sweep without a specific question: mean held-out loss of each point over its seeds, best first."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.launcher.runtime.sweep.cautions import caution
from plumbline.launcher.runtime.sweep.ends import axes_at_end
from plumbline.launcher.runtime.sweep.result import Label, Result
from plumbline.launcher.runtime.sweep.seed_means import mean, standard_error


@dataclass(frozen=True)
class Point:
    """Hold one point of a grid over its seeds."""

    labels: dict[str, Label]
    """Axis -> label, or value if the axis is a config key."""
    loss: float | None
    """Mean held-out loss in nats per token, or None until all seeds have one."""
    loss_error: float | None
    """Standard error of the mean, or None for one seed."""
    statuses: list[str]
    """Outcomes of the runs of its seeds, without duplicates."""

    def describe(self) -> str:
        """Return the mean loss with its error, or how the runs ended if a seed has no loss."""
        if self.loss is None:
            return ", ".join(self.statuses)
        return f"{self.loss:.4f}" + ("" if self.loss_error is None else f" ± {self.loss_error:.4f}")


@dataclass(frozen=True)
class GridSummary:
    """Hold all points, best first."""

    points: list[Point]
    caution: str | None = None
    """Which of their losses are not comparable, or None."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        values = asdict(self)
        if self.caution is None:
            del values["caution"]
        return values


def check(_settings: None, _results: Sequence[Result]) -> None:
    """Accept any cells."""


def summarize(_settings: None, results: Sequence[Result]) -> GridSummary:
    """Return points with mean loss and its standard error; a point is unfinished until all its seeds are finished."""
    points: dict[str, list[Result]] = {}
    for result in results:
        points.setdefault(json.dumps(result.labels), []).append(result)
    found = []
    for cells in points.values():
        losses = [cell.outcome.loss for cell in cells if cell.outcome.loss is not None]
        complete = len(losses) == len(cells)
        found.append(
            Point(
                labels=cells[0].labels,
                loss=mean(losses) if complete else None,
                loss_error=standard_error(losses) if complete else None,
                statuses=sorted({cell.outcome.status for cell in cells}),
            )
        )
    return GridSummary(sorted(found, key=lambda point: (point.loss is None, point.loss or 0.0)), caution(results))


def lines(summary: GridSummary) -> Iterator[str]:
    """Yield a line per point, then axes at whose end the best point lies, and losses that are not comparable."""
    yield "held-out loss, nats per token; of several seeds the mean and its standard error"
    for point in summary.points:
        yield f"{point.describe():<18}  {' '.join(f'{axis}={label}' for axis, label in point.labels.items())}"
    tried = [point.labels for point in summary.points]  # a diverged point bounds the best as well
    has_best = bool(summary.points) and summary.points[0].loss is not None
    for axis, end in axes_at_end(tried[0], tried) if has_best else ():
        yield f"the best has the {end} {axis} of its grid: a wider grid may hold a better one"
    if summary.caution is not None:
        yield summary.caution
