"""Which of several variants is best when each is tuned, and what else differs: outliers, int8 loss, speed.

A variant is a label of one axis. The other axes are what it is tuned over: its row is that of the point with the lowest
mean loss over seeds. A point counts only if all its seeds have finished.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from launcher.runtime.sweep.families import Result
from launcher.runtime.sweep.statistics import mean, standard_error

COLUMNS = {
    "loss": "loss",
    "kurt": "kurtosis",
    "kurt_peak": "its peak",
    "mmr": "max/median",
    "corr": "token corr.",
    "w8a8_delta": "int8 adds",
    "tokens_per_second": "tokens/s",
}


class ComparisonConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """How a comparison is read."""

    variants: str
    """The axis whose labels are compared; all other axes are tuned."""


def check(settings: ComparisonConfig | None, results: Sequence[Result]) -> None:
    """Refuse cells without the axis.

    Raises:
        ValueError: no block comparison, or a cell without the axis of the variants.
    """
    if settings is None:
        raise ValueError("comparison: missing; a sweep of this kind says `comparison: {variants: AXIS}`")
    for result in results:
        if settings.variants not in result["labels"]:
            axes = ", ".join(result["labels"])
            raise ValueError(f"comparison: variants = {settings.variants!r}: a grid has no such axis, only {axes}")


def summarize(settings: ComparisonConfig, results: Sequence[Result]) -> dict[str, Any]:
    """Variant -> its points, and which of them is best; quantities are [mean, standard error] over seeds."""
    variants: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        labels = dict(result["labels"])
        variant = str(labels.pop(settings.variants))
        point = " ".join(f"{axis}={label}" for axis, label in labels.items())
        variants.setdefault(variant, {}).setdefault(point, []).append(result)
    return {variant: _variant(points) for variant, points in variants.items()}


def _variant(points: dict[str, list[Result]]) -> dict[str, Any]:
    facts = {point: _point(cells) for point, cells in points.items()}
    complete = [point for point, values in facts.items() if values is not None]
    best = min(complete, key=lambda point: facts[point]["loss"][0], default=None)  # type: ignore[index]
    return {"best": best, "points": facts}


def _point(cells: Sequence[Result]) -> dict[str, Any] | None:
    """Mean and standard error over seeds of everything that all of them have."""
    if any(cell["loss"] is None for cell in cells):
        return None
    rows = [{"loss": cell["loss"], **(cell["outliers"] or {})} for cell in cells]
    shared = [key for key in COLUMNS if all(row.get(key) is not None for row in rows)]
    return {key: [mean(values := [row[key] for row in rows]), standard_error(values)] for key in shared}


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """One line for each variant at its best point, the best variant first."""
    width = max(map(len, summary))
    yield f"{'':<{width}}  " + " ".join(f"{title:>17}" for title in COLUMNS.values()) + "  at"
    complete = {variant: facts for variant, facts in summary.items() if facts["best"] is not None}
    for variant, facts in sorted(complete.items(), key=lambda item: item[1]["points"][item[1]["best"]]["loss"][0]):
        point = facts["points"][facts["best"]]
        cells = " ".join(f"{_text(point.get(key)):>17}" for key in COLUMNS)
        yield f"{variant:<{width}}  {cells}  {facts['best']}"
    for variant in summary.keys() - complete.keys():
        yield f"{variant:<{width}}  no point is complete"


def _text(value: list[float | None] | None) -> str:
    if value is None or value[0] is None:
        return "-"
    error = "" if value[1] is None else f" ± {value[1]:.2g}"
    return f"{value[0]:.5g}{error}"
