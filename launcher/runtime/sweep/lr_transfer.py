"""Measure whether the best learning rate stays the same as the model grows, for each curve and direction.

The optimum of a size is found in log2 of the learning rate, seed by seed: a parabola through the
best point and its neighbours within one octave (least squares when they are more than three). `axis` replaces it by
another hyperparameter. Everything here is a pure function of results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel

from plumbline.launcher.runtime.sweep.bootstrap import Interval, Intervals, intervals
from plumbline.launcher.runtime.sweep.families import (
    JOINT,
    base_size,
    family_members,
    joint_members,
    refuse_mixed,
    size_of,
    without_curves,
)
from plumbline.launcher.runtime.sweep.optimum import Curve, fit, loss_at
from plumbline.launcher.runtime.sweep.result import Result
from plumbline.launcher.runtime.sweep.seed_means import mean, standard_error


class LrTransferConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure how a learning-rate transfer sweep is evaluated. Sizes and learning rates come from the cells."""

    curves: str
    """The axis whose labels are compared, usually the parameterization's rule."""
    axis: str | None = None
    """An axis of positive numbers to use instead of optimizer.lr: the config key of another hyperparameter, for example
    model.initializer_range."""
    bootstrap: bool = False
    """Add intervals of shift and penalty: the middle 95 % of a bootstrap over seeds, which covers less with few seeds,
    and Student's t of the means over seeds."""


@dataclass(frozen=True)
class LrPoint:
    """Hold the loss at one learning rate over seeds."""

    lr: float
    loss: float | None
    """Mean over seeds, or None if one diverged or is not finished."""
    error: float | None
    """Standard error of the mean, or None without a mean or for one seed."""


@dataclass(frozen=True)
class Optimum:
    """Hold the best learning rate of a size, in log2, and the fitted loss there; None without any loss."""

    optimum: float | None
    """Mean over seeds of each seed's optimum."""
    optimum_error: float | None
    """Standard error of that mean."""
    optimum_of_seed: dict[int, float]
    edge: bool
    """Whether some seed's best point has no loss on one side, so that its true optimum may lie beyond."""
    optimum_of_mean: float | None
    """Optimum of the seed-mean curve."""
    loss: float | None
    """Mean loss over seeds at the optimum of the seed-mean curve."""
    loss_error: float | None
    resolved: bool
    """Whether the best point of the seed-mean curve has a loss on both sides."""


@dataclass(frozen=True)
class Penalty:
    """Hold the cost of training a size at the base's best learning rate, in nats per token."""

    nats: float
    error: float | None
    """Standard error of the paired difference."""


@dataclass(frozen=True)
class SizeSummary:
    """Hold one size of one curve."""

    points: list[LrPoint]
    """Points by ascending learning rate."""
    seeds: dict[int, Curve]
    diverged: dict[float, list[int]]
    """Learning rate -> seeds that diverged there."""
    unfinished: dict[float, list[int]]
    """Learning rate -> seeds without a loss that did not diverge: they failed, or are not finished."""
    best: Optimum
    penalty: Penalty | None = None
    """None if the optimum of base or size is not resolved, or the base's lies outside this size's grid."""
    intervals: Intervals | None = None
    """Intervals of shift and penalty, if requested and there are enough seeds."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the fields of the optimum at the top level."""
        values = asdict(self)
        optimum, penalty, intervals = (values.pop(key) for key in ("best", "penalty", "intervals"))
        return {**values, **optimum, "penalty": penalty} | ({"intervals": intervals} if intervals else {})


@dataclass(frozen=True)
class Shift:
    """Hold how far the optimum moves from the base to the largest size, in octaves, paired by seed."""

    base: int
    largest: int
    octaves: float
    octaves_error: float | None
    per_doubling: float
    """Slope over all sizes, in octaves per doubling of the size."""
    per_doubling_error: float | None
    edge: bool
    """Whether some size's optimum is at the edge of its grid."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the two sizes named `from` and `to`."""
        values = asdict(self)
        return {"from": values.pop("base"), "to": values.pop("largest"), **values}


@dataclass(frozen=True)
class CurveSummary:
    """Hold all sizes of one curve of one family."""

    sizes: dict[int, SizeSummary]
    shift: Shift | None
    """None with fewer than two sizes, or without a seed that both ends have."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sizes = {size: found.to_json() for size, found in self.sizes.items()}
        return {"sizes": sizes, "shift": None if self.shift is None else self.shift.to_json()}


@dataclass(frozen=True)
class LrTransferSummary:
    """Hold all curves of a learning-rate transfer sweep."""

    base: dict[str, int]
    """Family -> size of the base."""
    families: dict[str, dict[str, CurveSummary]]
    """Family -> label -> curve."""
    axis: str = "optimizer.lr"
    """The hyperparameter that every table shows."""

    @property
    def shown(self) -> dict[str, dict[str, CurveSummary]]:
        """Return the families with several sizes, or only the first if none has, since all then hold just the base."""
        several = {
            family: curves
            for family, curves in self.families.items()
            if any(len(curve.sizes) > 1 for curve in curves.values())
        }
        return several or dict([*self.families.items()][:1])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        families = {
            family: {label: curve.to_json() for label, curve in curves.items()}
            for family, curves in self.families.items()
        }
        named = {} if self.axis == "optimizer.lr" else {"axis": self.axis}
        return {**named, "base": self.base, "families": families}


def check(settings: LrTransferConfig | None, results: Sequence[Result]) -> None:
    """Refuse cells that cannot be sorted into curves, sizes and learning rates.

    Raises:
        ValueError: no block lr_transfer, a cell without the axis of the curves, no common base size, or two different
            runs at one point of a curve.
    """
    if settings is None:
        raise ValueError(without_curves("lr_transfer"))
    results = _along(settings.axis, results)
    family_members(settings.curves, results)
    joint_members(settings.curves, results)
    refuse_mixed("lr_transfer", settings.curves, settings.axis or "optimizer.lr", results)


def summarize(settings: LrTransferConfig, results: Sequence[Result]) -> LrTransferSummary:
    """Return, per family and curve, each size's optimum, its shift from the base, and the cost of not re-tuning."""
    results = _along(settings.axis, results)
    base, families = base_size(results), family_members(settings.curves, results)
    if joint := joint_members(settings.curves, results):
        base, families = {**base, JOINT: math.prod(base.values())}, {**families, JOINT: joint}
    return LrTransferSummary(
        base,
        {
            family: {label: _curve(cells, family, base[family], settings.bootstrap) for label, cells in members.items()}
            for family, members in families.items()
        },
        settings.axis or "optimizer.lr",
    )


def _along(axis: str | None, results: Sequence[Result]) -> Sequence[Result]:
    """Return results with the learning rate replaced by their value on the axis.

    Raises:
        ValueError: a cell has no positive number there.
    """
    if axis is None:
        return results
    placed = []
    for result in results:
        value = result.labels.get(axis)
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(
                f"lr_transfer: axis = {axis!r}: {result.labels} has no positive number there; give each grid that "
                "axis, a config key with a list of values"
            )
        placed.append(replace(result, lr=float(value)))
    return placed


def _curve(results: Sequence[Result], family: str, base: int, bootstrap: bool) -> CurveSummary:
    """Return all sizes of one curve of one family."""
    sizes = {
        size: _size([result for result in results if size_of(result, family) == size])
        for size in sorted({size_of(result, family) for result in results})
    }
    of_base = sizes.get(base)
    sizes = {size: replace(found, penalty=penalty(found, of_base)) for size, found in sizes.items()}
    if bootstrap and of_base is not None:
        sizes = {
            size: replace(found, intervals=None if size == base else intervals(of_base.seeds, found.seeds))
            for size, found in sizes.items()
        }
    return CurveSummary(sizes, shift({size: found.best for size, found in sizes.items()}, base))


def _size(results: Sequence[Result]) -> SizeSummary:
    """Return losses and optimum of one size of one curve."""
    seeds: dict[int, Curve] = {}
    diverged: dict[float, list[int]] = {}
    unfinished: dict[float, list[int]] = {}
    for result in results:
        curve = seeds.setdefault(result.seed, {})
        if result.outcome.loss is not None:
            curve[result.lr] = result.outcome.loss
        else:
            (diverged if result.outcome.diverged else unfinished).setdefault(result.lr, []).append(result.seed)
    return SizeSummary(_points(results, seeds), seeds, diverged, unfinished, optimum(seeds))


def _points(results: Sequence[Result], seeds: dict[int, Curve]) -> list[LrPoint]:
    """Return the mean loss at each learning rate, or None where a seed diverged or is not finished."""
    points = []
    for lr in sorted({result.lr for result in results}):
        losses = [curve[lr] for curve in seeds.values() if lr in curve]
        whole = len(losses) == len(seeds)
        error = standard_error(losses) if whole else None
        points.append(LrPoint(lr, mean(losses) if whole else None, error))
    return points


def optimum(seeds: dict[int, Curve]) -> Optimum:
    """Return the best learning rate and the fitted loss there."""
    fits = {seed: fit(curve) for seed, curve in seeds.items() if curve}
    common = _common(seeds)
    best, mean_edge = fit(_mean_curve(common)) if all(common.values()) else (None, True)
    losses = [] if best is None else [loss_at(curve, best) for curve in common.values()]
    known = [loss for loss in losses if loss is not None]
    values = [value for value, _ in fits.values()]
    return Optimum(
        optimum=mean(values) if values else None,
        optimum_error=standard_error(values),
        optimum_of_seed={seed: value for seed, (value, _) in fits.items()},
        edge=any(edge for _, edge in fits.values()),
        optimum_of_mean=best,
        loss=mean(known) if known else None,
        loss_error=standard_error(known),
        resolved=not mean_edge,
    )


def _common(seeds: dict[int, Curve]) -> dict[int, Curve]:
    """Return the curves restricted to learning rates at which every seed has a loss."""
    shared = set.intersection(*(set(curve) for curve in seeds.values()))
    return {seed: {lr: curve[lr] for lr in shared} for seed, curve in seeds.items()}


def _mean_curve(curves: dict[int, Curve]) -> Curve:
    lrs = next(iter(curves.values()))
    return {lr: mean([curve[lr] for curve in curves.values()]) for lr in lrs}


def penalty(size: SizeSummary, base: SizeSummary | None) -> Penalty | None:
    """Return the nats lost by training a size at the base's best learning rate instead of its own.

    Every seed's curve is read at the optima of the two seed-mean curves, so the mean is the difference on the seed-mean
    curve, and the error that of a paired difference. Return None if an optimum is not resolved, or the base's lies
    outside this size's grid.
    """
    if base is None:
        return None
    both = [each.best for each in (base, size)]
    places = [best.optimum_of_mean for best in both if best.resolved and best.optimum_of_mean is not None]
    if len(places) < len(both):
        return None
    pairs = [[loss_at(curve, place) for place in places] for curve in _common(size.seeds).values()]
    differences = [there - here for there, here in pairs if there is not None and here is not None]
    if len(differences) < len(pairs):
        return None
    return Penalty(mean(differences), standard_error(differences))


def shift(sizes: Mapping[int, Optimum], base: int) -> Shift | None:
    """Return the octaves between the optima of base and largest size, and the slope over all sizes per doubling.

    Both are computed per seed, then averaged.
    """
    largest = max(sizes, default=base)
    if base not in sizes or largest == base:
        return None
    of_seed = {size: best.optimum_of_seed for size, best in sizes.items()}
    both = [seed for seed in of_seed[base] if seed in of_seed[largest]]
    if not both:
        return None
    moved = [of_seed[largest][seed] - of_seed[base][seed] for seed in both]
    slopes = []
    for seed in both:
        known = [(math.log2(size), of_seed[size][seed]) for size in sizes if seed in of_seed[size]]
        x, y = zip(*known, strict=True)
        slopes.append(float(np.polyfit(x, y, 1)[0]))
    return Shift(
        base=base,
        largest=largest,
        octaves=mean(moved),
        octaves_error=standard_error(moved),
        per_doubling=mean(slopes),
        per_doubling_error=standard_error(slopes),
        edge=any(best.edge for best in sizes.values()),
    )


def lines(summary: LrTransferSummary) -> Iterator[str]:
    """Yield a table for each family with several sizes, with a line on the shift of each curve."""
    axis = "lr" if summary.axis == "optimizer.lr" else "value"
    best, lost = f"best {axis}", f"lost at base {axis}"
    for family, curves in summary.shown.items():
        yield f"{family:>6} {'curve':<12} {best:>10} {'log2':>15} {'fitted loss':>17} {lost:>19}"
        for label, curve in curves.items():
            for size, found in curve.sizes.items():
                yield f"{size:>6} {label:<12} {_row(found)}"
            if curve.shift is not None:
                yield f"       {label}: {_moved(curve.shift)}"
        yield ""


def _moved(shift: Shift) -> str:
    return (
        f"{_with_error(shift.octaves, shift.octaves_error, '+.2f')} octaves from {shift.base} to {shift.largest}, "
        f"{_with_error(shift.per_doubling, shift.per_doubling_error, '+.2f')} per doubling"
        + (" (unresolved: an optimum is at an end of its grid)" if shift.edge else "")
    )


def _row(size: SizeSummary) -> str:
    best, lost = size.best, size.penalty
    if best.optimum is None:
        return "no finished run"
    notes = ["at an end of the grid"] * best.edge
    if _is_coarse(size):
        lowest = min((point.loss, point.lr) for point in size.points if point.loss is not None)
        notes += [
            f"a rough fit, of rates over an octave apart: the lowest measured is {lowest[0]:.4f} at {lowest[1]:g}"
        ]
    for ended, those in (("diverged", size.diverged), ("not finished", size.unfinished)):
        if those:
            notes += [f"{ended}: {', '.join(f'{lr:g} (seeds {_listed(seeds)})' for lr, seeds in those.items())}"]
    if size.intervals is not None:
        moved, costs = _range(size.intervals.shift, "+.2f"), _range(size.intervals.penalty, ".4f")
        notes += [f"shift {moved} octaves, lost {costs}: nominal 95 % of a bootstrap"]
        if size.intervals.shift_t is not None:
            notes += [_student(size.intervals.seeds, size.intervals.shift_t, size.intervals.penalty_t)]
        if share := size.intervals.unresolved:
            notes += [f"{100 * share:.2f} % of samples at the end of a grid"]
    return (
        f"{2**best.optimum:>10.3g} {_with_error(best.optimum, best.optimum_error, '.2f'):>15} "
        f"{'-' if best.loss is None else _with_error(best.loss, best.loss_error, '.4f'):>17} "
        f"{'-' if lost is None else _with_error(lost.nats, lost.error, '.4f'):>19}"
        f"{''.join(f'  {note}' for note in notes)}"
    )


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _is_coarse(size: SizeSummary) -> bool:
    """Return whether learning rates are more than an octave apart beside the best one that was tried."""
    tried = [(point.lr, point.loss) for point in size.points if point.loss is not None]
    if len(tried) < 3:
        return False
    best = min(range(len(tried)), key=lambda index: tried[index][1])
    near = [lr for lr, _ in tried[max(0, best - 1) : best + 2]]
    return any(after > 2.001 * before for before, after in pairwise(near))


def _student(seeds: int, shift: Interval, penalty: Interval | None) -> str:
    costs = "" if penalty is None else f", lost {_range(penalty, '.4f')}"
    return f"Student's t over {seeds} seeds, 95 %: shift {_range(shift, '+.2f')} octaves{costs}"


def _range(interval: Interval, form: str) -> str:
    low, high = ("beyond the grid" if end is None else f"{end:{form}}" for end in (interval.low, interval.high))
    return f"{low} to {high}"


def _with_error(value: float, error: float | None, form: str) -> str:
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.strip('+')}}")
