"""Compare tuned variants: which is best, and what else differs (exact match, outliers, int8 loss, speed).

A variant is a label of one axis. Another axis may separate things whose losses are not comparable, such as tasks: each
of its labels gets a table. A variant is tuned over the remaining axes, and its row shows its best point, by mean over
seeds. A point only counts if all its seeds have finished; others are named beside the row. Further tables subtract one
variant from all others, seed by seed.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from plumbline.launcher.runtime.scoring.scores import wilson_interval
from plumbline.launcher.runtime.sweep.cautions import caution
from plumbline.launcher.runtime.sweep.differences import Difference, OfSeeds, differences
from plumbline.launcher.runtime.sweep.ends import axes_at_end
from plumbline.launcher.runtime.sweep.result import MATCHES, Result
from plumbline.launcher.runtime.sweep.seed_means import Estimate, estimate

COLUMNS = {
    "loss": "loss",
    "thinking_loss": "thinking loss",
    "exact_match": "exact match",
    "thinking_exact_match": "thinking",
    "answer_match": "answer match",
    "thinking_answer_match": "with thoughts",
    "kurt": "kurtosis",
    "kurt_peak": "its peak",
    "mmr": "max/median",
    "corr": "token corr.",
    "w8a8_delta": "int8 adds",
    "tokens_per_second": "tokens/s",
}
LOSSES = ("loss", "thinking_loss")
PLOTTED = (*LOSSES, *MATCHES)
SUBTRACTED = (*PLOTTED, "kurt", "w8a8_delta")
Merit = Literal["loss", "thinking_loss", "exact_match", "thinking_exact_match", "answer_match", "thinking_answer_match"]
MERITS: dict[Merit, tuple[str, ...]] = {
    "loss": ("loss",),
    "thinking_loss": ("thinking_loss", "loss"),
    "exact_match": ("exact_match",),
    "thinking_exact_match": ("thinking_exact_match", "exact_match"),
    "answer_match": ("answer_match",),
    "thinking_answer_match": ("thinking_answer_match", "answer_match"),
}  # quantities by which each merit ranks, in this order, then by the loss
NAMED = 3  # most excluded points of a variant that are named; others are only counted
Point = dict[str, Estimate]
"""Mean over seeds for those of COLUMNS that every seed of a point has."""


@dataclass(frozen=True)
class Solved:
    """Hold how many seeds of a variant's best point reach a score."""

    seeds: int
    of: int
    low: float
    """Lower end of the 95 % interval of the share of seeds (Wilson); `high` is the upper end."""
    high: float
    steps: dict[int, int | None]
    """Seed -> step of the first evaluation that reached the score, or None if none did."""


@dataclass(frozen=True)
class Variant:
    """Hold the results of one variant."""

    best: str | None
    """Its best point, as axis=label, or None if no point is complete."""
    points: dict[str, Point | None]
    """Points by axis=label; None for one that is incomplete."""
    seeds: dict[str, dict[int, float]]
    """Quantity -> seed -> value, for those of PLOTTED that the best point has."""
    solved: Solved | None = None
    """None if `ComparisonConfig.solved` is None, or no point is complete."""
    notes: list[str] = field(default_factory=list)
    """Points that were excluded from the choice, and axes on which the best point is at an end."""
    less: dict[str, dict[str, Difference]] = field(default_factory=dict)
    """Label of `ComparisonConfig.against` -> one of SUBTRACTED -> this variant less that one, each at its best."""

    @property
    def at_best(self) -> Point | None:
        """Return the best point, or None if no point is complete."""
        return None if self.best is None else self.points[self.best]


@dataclass(frozen=True)
class ComparisonSummary:
    """Hold the tables of a comparison."""

    tables: dict[str, dict[str, Variant]]
    """Table -> variants, best first. Tables are named by their label of `within`; without it there is one, "all"."""
    cautions: dict[str, str]
    """Table -> which of its losses are not comparable, only for tables that have any."""

    def to_json(self) -> dict[str, Any]:
        """Return the tables as plain values."""
        tables: dict[str, Any] = asdict(self)["tables"]
        for variant in (variant for variants in tables.values() for variant in variants.values()):
            for key in ("solved", "less", "notes"):
                if not variant[key]:
                    del variant[key]
        return tables


class ComparisonConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure how a comparison is evaluated."""

    variants: str
    """The axis whose labels are compared."""
    within: str | None = None
    """An axis whose labels are kept apart, with a table for each; all remaining axes are tuned."""
    by: Merit = "loss"
    """Criterion for choosing points and ordering rows: the loss, exact_match, answer_match, or one of these with
    thoughts (thinking_loss, ...; without for variants that do not think). If there are no matches, the loss."""
    solved: Annotated[float, Field(gt=0, le=1)] | None = None
    """A threshold for `by`: report how many seeds of the best point reach it at the end, and at which step each first
    did."""
    against: list[str] = []
    """Labels of `variants`. For each, a further table has all others less this one, paired by seed, each at its best
    point, with Student's t intervals. In the column of `by`, variants that do not think count without thoughts."""

    @model_validator(mode="after")
    def _solves_something(self) -> "ComparisonConfig":
        if self.solved is not None and self.by in LOSSES:
            raise ValueError(
                f"solved = {self.solved} is a share of right answers: by = {self.by!r} has none; say "
                "by: exact_match, or another of its kind"
            )
        return self


def check(settings: ComparisonConfig | None, results: Sequence[Result]) -> None:
    """Refuse cells without the required axes.

    Raises:
        ValueError: no block comparison, or a cell without the axis of the variants.
    """
    if settings is None:
        raise ValueError("comparison: missing; a sweep of this kind says `comparison: {variants: AXIS}`")
    wanted = {
        key: axis for key, axis in settings.model_dump(include={"variants", "within"}).items() if axis is not None
    }
    for result in results:
        for key, axis in wanted.items():
            if axis not in result.labels:
                axes = ", ".join(result.labels)
                raise ValueError(f"comparison: {key} = {axis!r}: a grid has no such axis, only {axes}")
    labels = list(dict.fromkeys(str(result.labels[settings.variants]) for result in results))
    for label in settings.against:
        if label not in labels:
            there = ", ".join(map(repr, labels))
            raise ValueError(f"comparison: against = {label!r}: {settings.variants} has no such label, only {there}")
    if settings.within == settings.variants:
        raise ValueError(f"comparison: within = {settings.within!r}: that axis is compared; name another, or none")


def summarize(settings: ComparisonConfig, results: Sequence[Result]) -> ComparisonSummary:
    """Sort cells into tables, variants and points, and find the best point of each variant."""
    tables: dict[str, dict[str, dict[str, list[Result]]]] = {}
    results_of: dict[str, list[Result]] = {}
    for result in results:
        labels = dict(result.labels)
        table = "all" if settings.within is None else str(labels.pop(settings.within))
        results_of.setdefault(table, []).append(result)
        variant = str(labels.pop(settings.variants))
        point = " ".join(f"{axis}={label}" for axis, label in labels.items())
        tables.setdefault(table, {}).setdefault(variant, {}).setdefault(point, []).append(result)
    return ComparisonSummary(
        {
            table: _subtracted(
                _ranked({name: _variant(points, settings) for name, points in variants.items()}, settings.by),
                variants,
                settings,
            )
            for table, variants in tables.items()
        },
        {table: said for table, of_table in results_of.items() if (said := caution(of_table)) is not None},
    )


def _variant(points: dict[str, list[Result]], settings: ComparisonConfig) -> Variant:
    found = {point: _point(cells) for point, cells in points.items()}
    complete = {point: values for point, values in found.items() if values is not None}
    best = max(complete, key=lambda point: _merit(complete[point], settings.by), default=None)
    seeds = {} if best is None else {key: _of_seeds(key, points[best]) for key in PLOTTED if key in complete[best]}
    solved = None
    if best is not None and settings.solved is not None:
        solved = _solved(points[best], settings.by, settings.solved)
    return Variant(best, found, seeds, solved, [*_notes(points, complete, best)])


def _notes(points: dict[str, list[Result]], complete: Collection[str], best: str | None) -> Iterator[str]:
    """Yield which points are excluded because a seed has no loss, and on which axes the best point is at an end."""
    out = [point for point in points if point not in complete]
    if out:
        named = (f"{point} ({_missing(points[point])})" for point in out[:NAMED])
        more = f" and {len(out) - NAMED} more" if len(out) > NAMED else ""
        yield f"left out: {', '.join(named)}{more}"
    if best is None:
        return
    labels = {point: cells[0].labels for point, cells in points.items()}
    for axis, end in axes_at_end(labels[best], [*labels.values()]):
        yield f"{axis} is the {end} of its grid"


def _missing(cells: Sequence[Result]) -> str:
    """Return how the seeds of a point without a loss ended."""
    ended = Counter(cell.outcome.status for cell in cells if cell.outcome.loss is None)
    return ", ".join(
        f"{count} of {len(cells)} {status}" + (" without a loss" if status == "finished" else "")
        for status, count in ended.items()
    )


def _solved(cells: Sequence[Result], by: Merit, threshold: float) -> Solved:
    """Return how many seeds of a point reach a score at the end, and when each first did."""
    right, steps = 0, {}
    for cell in cells:
        of_step = next((of for score in MERITS[by] if (of := cell.outcome.evaluations.get(score))), {})
        right += bool(of_step) and of_step[max(of_step)] >= threshold
        steps[cell.seed] = min((step for step, value in of_step.items() if value >= threshold), default=None)
    return Solved(right, len(cells), *wilson_interval(right, len(cells)), steps)


def _of_seeds(key: str, cells: Sequence[Result]) -> dict[int, float]:
    return {cell.seed: value for cell in cells if (value := _quantities(cell)[key]) is not None}


def _ranked(variants: dict[str, Variant], by: Merit) -> dict[str, Variant]:
    def merit(variant: Variant) -> tuple[float, float]:
        return (-math.inf, -math.inf) if variant.at_best is None else _merit(variant.at_best, by)

    return dict(sorted(variants.items(), key=lambda item: merit(item[1]), reverse=True))


def _subtracted(
    variants: dict[str, Variant], cells: dict[str, dict[str, list[Result]]], settings: ComparisonConfig
) -> dict[str, Variant]:
    """Return the variants, each with its differences from those of `against`, where both have a best point."""
    at_best = {
        name: _subtractable(cells[name][variant.best], settings.by)
        for name, variant in variants.items()
        if variant.best is not None
    }
    others = {other: at_best[other] for other in settings.against if other in at_best}
    less = {
        name: {other: differences(of_seeds, at) for other, at in others.items() if other != name}
        for name, of_seeds in at_best.items()
    }
    return {name: replace(variant, less=less.get(name, {})) for name, variant in variants.items()}


def _subtractable(cells: Sequence[Result], by: Merit) -> OfSeeds:
    """Return each of SUBTRACTED by seed; `by` as it ranks, so that thoughts are set against what does not think."""
    found = {key: _of_seeds(key, cells) for key in SUBTRACTED}
    return found | {by: next(filter(None, (found[key] for key in MERITS[by])), {})}


def _merit(point: Point, by: Merit) -> tuple[float, float]:
    """Return a sort key for the quality of a point, larger being better; ties in matches are broken by lower loss."""
    known = [point[key].mean for key in MERITS[by] if key in point]
    first = known[0] if known else -math.inf
    return -first if by in LOSSES else first, -point["loss"].mean


def _point(cells: Sequence[Result]) -> Point | None:
    """Return mean and standard error over seeds of all quantities that every seed has, or None if one has no loss."""
    if any(cell.outcome.loss is None for cell in cells):
        return None
    rows = [_quantities(cell) for cell in cells]
    columns = {key: [value for row in rows if (value := row[key]) is not None] for key in COLUMNS}
    return {key: estimate(known) for key, known in columns.items() if len(known) == len(rows)}


def _quantities(cell: Result) -> dict[str, float | None]:
    """Return a cell's value for each of COLUMNS, or None if missing."""
    outliers = cell.outcome.outliers
    known = vars(cell.outcome) | ({} if outliers is None else vars(outliers))
    known |= {"thinking_loss": cell.outcome.thinking_loss}
    return {key: known.get(key) for key in COLUMNS}


def lines(summary: ComparisonSummary) -> Iterator[str]:
    """Yield, for each table, a line per variant at its best point, best variant first."""
    for table, variants in summary.tables.items():
        if len(summary.tables) > 1:
            yield table
        yield from _table(variants)
        yield from _differences(variants)
        if table in summary.cautions:
            yield summary.cautions[table]


def _table(variants: dict[str, Variant]) -> Iterator[str]:
    best = {name: point for name, variant in variants.items() if (point := variant.at_best) is not None}
    columns = [key for key in COLUMNS if any(key in point for point in best.values())]
    width = max(map(len, variants))
    yield f"{'':<{width}}  " + " ".join(f"{COLUMNS[key]:>17}" for key in columns) + "  at"
    for name, point in best.items():
        cells = " ".join(f"{_text(point.get(key)):>17}" for key in columns)
        yield f"{name:<{width}}  {cells}  {variants[name].best}{''.join(f'  {note}' for note in variants[name].notes)}"
    for name, solved in ((name, variants[name].solved) for name in best):
        if solved is not None:
            first = ", ".join(f"{'never' if step is None else step} ({seed})" for seed, step in solved.steps.items())
            yield (
                f"{name}: solved with {solved.seeds} of {solved.of} seeds ({solved.low:.0%} to {solved.high:.0%}, 95 % "
                f"Wilson interval), first in step (seed) {first}"
            )
    for name in [name for name in variants if name not in best]:
        yield f"{name:<{width}}  no point is complete{''.join(f'  {note}' for note in variants[name].notes)}"


def _differences(variants: dict[str, Variant]) -> Iterator[str]:
    """Yield a table for each variant that was subtracted, with a line for each variant from which it was."""
    chosen = any(len(variant.points) > 1 for variant in variants.values())
    note = "; the points were chosen on these seeds, which the intervals leave out" if chosen else ""
    width = max(map(len, variants))
    for other in dict.fromkeys(other for variant in variants.values() for other in variant.less):
        rows = {name: variant.less[other] for name, variant in variants.items() if other in variant.less}
        columns = [key for key in SUBTRACTED if any(key in row for row in rows.values())]
        yield ""
        if not columns:
            yield f"less {other}: two seeds have to be finished of both"
            continue
        yield f"less {other}, paired by seed, with 95 % intervals by Student's t{note}"
        yield f"{'':<{width}}  " + " ".join(f"{COLUMNS[key]:>30}" for key in columns)
        for name, row in rows.items():
            yield f"{name:<{width}}  " + " ".join(f"{row.get(key, '-')!s:>30}" for key in columns)


def _text(value: Estimate | None) -> str:
    if value is None:
        return "-"
    error = "" if value.error is None else f" ± {value.error:.2g}"
    return f"{value.mean:.5g}{error}"
