"""Summarize a sweep with no question of its own: mean held-out loss of each point over its seeds, best first."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from plumbline.launcher.runtime.sweep.result import Result
from plumbline.launcher.runtime.sweep.statistics import mean, standard_error


def check(_settings: None, _results: Sequence[Result]) -> None:
    """Accept any cells."""


def summarize(_settings: None, results: Sequence[Result]) -> dict[str, Any]:
    """Return points with mean loss and its standard error; a point counts as unfinished until all its seeds are."""
    points: dict[str, list[Result]] = {}
    for result in results:
        points.setdefault(json.dumps(result.labels), []).append(result)
    rows = []
    for cells in points.values():
        losses = [cell.outcome.loss for cell in cells if cell.outcome.loss is not None]
        complete = len(losses) == len(cells)
        rows.append(
            {
                "labels": cells[0].labels,
                "loss": mean(losses) if complete else None,
                "loss_error": standard_error(losses) if complete else None,
                "statuses": sorted({cell.outcome.status for cell in cells}),
            }
        )
    return {"points": sorted(rows, key=lambda row: (row["loss"] is None, row["loss"] or 0.0))}


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each point."""
    for row in summary["points"]:
        error = "" if row["loss_error"] is None else f" ± {row['loss_error']:.4f}"
        loss = ", ".join(row["statuses"]) if row["loss"] is None else f"{row['loss']:.4f}{error}"
        yield f"{loss:<18}  {' '.join(f'{axis}={label}' for axis, label in row['labels'].items())}"
