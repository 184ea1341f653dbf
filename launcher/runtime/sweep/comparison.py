"""Compare variants, each tuned: which is best, and what else differs (exact match, outliers, int8 loss, speed).

A variant is a label of one axis. Another axis may keep things apart that have losses of their own, such as tasks: each
of its labels gets a table. The other axes are what a variant is tuned over: its row is that of its best point, by mean
over seeds. A point counts only if all its seeds have finished.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from plumbline.launcher.runtime.sweep.result import Result
from plumbline.launcher.runtime.sweep.statistics import mean, standard_error

COLUMNS = {
    "loss": "loss",
    "exact_match": "exact match",
    "thinking_exact_match": "thinking",
    "kurt": "kurtosis",
    "kurt_peak": "its peak",
    "mmr": "max/median",
    "corr": "token corr.",
    "w8a8_delta": "int8 adds",
    "tokens_per_second": "tokens/s",
}
PLOTTED = ("loss", "exact_match", "thinking_exact_match")
Merit = Literal["loss", "exact_match", "thinking_exact_match"]
MATCHES: dict[Merit, tuple[str, ...]] = {
    "loss": (),
    "exact_match": ("exact_match",),
    "thinking_exact_match": ("thinking_exact_match", "exact_match"),
}  # what each goes by, in this order; then by the loss


class ComparisonConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Say how a comparison is read."""

    variants: str
    """The axis whose labels are compared."""
    within: str | None = None
    """An axis whose labels are kept apart, a table for each; all remaining axes are tuned."""
    by: Merit = "loss"
    """What chooses points and orders rows: the loss; exact_match; or thinking_exact_match, and exact_match of those
    that do not think. Where nothing is matched, the loss."""


def check(settings: ComparisonConfig | None, results: Sequence[Result]) -> None:
    """Refuse cells without the axis.

    Raises:
        ValueError: no block comparison, or a cell without the axis of the variants.
    """
    if settings is None:
        raise ValueError("comparison: missing; a sweep of this kind says `comparison: {variants: AXIS}`")
    wanted = {key: axis for key, axis in settings.model_dump(exclude={"by"}).items() if axis is not None}
    for result in results:
        for key, axis in wanted.items():
            if axis not in result.labels:
                axes = ", ".join(result.labels)
                raise ValueError(f"comparison: {key} = {axis!r}: a grid has no such axis, only {axes}")
    if settings.within == settings.variants:
        raise ValueError(f"comparison: within = {settings.within!r}: that axis is compared; name another, or none")


def summarize(settings: ComparisonConfig, results: Sequence[Result]) -> dict[str, Any]:
    """Return table -> variant, the best first -> its points, which of them is best, and what each seed has there.

    Quantities of points are [mean, standard error] over seeds. A table has the name of its label of `within`; there is
    one, "all", without it.
    """
    tables: dict[str, dict[str, dict[str, list[Result]]]] = {}
    for result in results:
        labels = dict(result.labels)
        table = "all" if settings.within is None else str(labels.pop(settings.within))
        variant = str(labels.pop(settings.variants))
        point = " ".join(f"{axis}={label}" for axis, label in labels.items())
        tables.setdefault(table, {}).setdefault(variant, {}).setdefault(point, []).append(result)
    return {
        table: _ranked({variant: _variant(points, settings.by) for variant, points in variants.items()}, settings.by)
        for table, variants in tables.items()
    }


def _variant(points: dict[str, list[Result]], by: Merit) -> dict[str, Any]:
    facts = {point: _point(cells) for point, cells in points.items()}
    complete = {point: values for point, values in facts.items() if values is not None}
    best = max(complete, key=lambda point: _merit(complete[point], by), default=None)
    seeds = {} if best is None else {key: _of_seeds(key, points[best]) for key in PLOTTED if key in complete[best]}
    return {"best": best, "points": facts, "seeds": seeds}


def _of_seeds(key: str, cells: Sequence[Result]) -> dict[int, float]:
    return {cell.seed: value for cell in cells if (value := _quantities(cell)[key]) is not None}


def _ranked(variants: dict[str, Any], by: Merit) -> dict[str, Any]:
    def merit(facts: dict[str, Any]) -> float:
        return -math.inf if facts["best"] is None else _merit(facts["points"][facts["best"]], by)

    return dict(sorted(variants.items(), key=lambda item: merit(item[1]), reverse=True))


def _merit(point: dict[str, Any], by: Merit) -> float:
    """Return how good a point is: the larger, the better."""
    known = [point[key][0] for key in MATCHES[by] if key in point]
    return float(known[0] if known else -point["loss"][0])


def _point(cells: Sequence[Result]) -> dict[str, Any] | None:
    """Return mean and standard error over seeds of everything that all of them have; None while one has no loss."""
    if any(cell.outcome.loss is None for cell in cells):
        return None
    rows = [_quantities(cell) for cell in cells]
    columns = {key: [value for row in rows if (value := row[key]) is not None] for key in COLUMNS}
    return {key: [mean(known), standard_error(known)] for key, known in columns.items() if len(known) == len(rows)}


def _quantities(cell: Result) -> dict[str, float | None]:
    """Return what a cell has for each of COLUMNS; None: nothing."""
    outliers = cell.outcome.outliers
    known = vars(cell.outcome) | ({} if outliers is None else vars(outliers))
    return {key: known.get(key) for key in COLUMNS}


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """Yield for each table a line for each variant at its best point, the best variant first."""
    for table, variants in summary.items():
        if len(summary) > 1:
            yield table
        yield from _table(variants)


def _table(variants: dict[str, Any]) -> Iterator[str]:
    best = {name: facts["points"][facts["best"]] for name, facts in variants.items() if facts["best"] is not None}
    columns = [key for key in COLUMNS if any(key in point for point in best.values())]
    width = max(map(len, variants))
    yield f"{'':<{width}}  " + " ".join(f"{COLUMNS[key]:>17}" for key in columns) + "  at"
    for variant, point in best.items():
        cells = " ".join(f"{_text(point.get(key)):>17}" for key in columns)
        yield f"{variant:<{width}}  {cells}  {variants[variant]['best']}"
    for variant in [name for name in variants if name not in best]:
        yield f"{variant:<{width}}  no point is complete"


def _text(value: list[float | None] | None) -> str:
    if value is None or value[0] is None:
        return "-"
    error = "" if value[1] is None else f" ± {value[1]:.2g}"
    return f"{value[0]:.5g}{error}"
