"""Tell how well few seeds know an optimum and the cost of missing it: a bootstrap over seeds.

Each sample draws as many seeds as there are, with replacement, the same ones for both sizes, averages their curves,
finds both optima anew and reads the larger size's curve at both: what the base's value costs there, with the base's own
optimum as uncertain as it is. A cost is reckoned once for each sample and never paired by hand, so it can be negative
only by the curve's own shape. With three to five seeds the percentiles are narrow: read them as a lower bound of the
uncertainty.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plumbline.launcher.runtime.sweep.optimum import OCTAVE, Curve

SAMPLES = 10_000
PERCENTILES = (2.5, 97.5)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Hold the middle 95 % of what the samples give; None: the samples reach beyond the grid, there is no such end."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Intervals:
    """Hold what the bootstrap says of one size against the base."""

    shift: Interval
    """Octaves from the base's optimum to the size's."""
    penalty: Interval
    """Nats lost at the base's optimum."""
    unresolved: float
    """Share of samples in which one of the two optima is the last point of its grid."""


def intervals(base: Mapping[int, Curve], size: Mapping[int, Curve], samples: int = SAMPLES) -> Intervals | None:
    """Return intervals of shift and penalty; None with fewer than two seeds in common, or three values of each.

    Args:
        base: seed -> its curve at the base size.
        size: the same of another size.
        samples: how many times seeds are drawn; the drawing is the same each time.
    """
    seeds = sorted(base.keys() & size.keys())
    if len(seeds) < 2:
        return None
    (x, base_losses), (y, size_losses) = _table(base, seeds), _table(size, seeds)
    if min(len(x), len(y)) < 3:
        return None
    drawn = np.random.default_rng(0).integers(len(seeds), size=(samples, len(seeds)))
    counts = np.stack([(drawn == index).mean(1) for index in range(len(seeds))], 1)  # (samples, seeds)
    base_means, size_means = counts @ base_losses, counts @ size_losses
    (base_best, base_edge), (size_best, size_edge) = _optima(x, base_means), _optima(y, size_means)
    lost = _read(y, size_means, base_best) - _read(y, size_means, size_best)
    lost[(base_best < y[0] - 1e-9) | (base_best > y[-1] + 1e-9)] = np.inf
    return Intervals(_interval(size_best - base_best), _interval(lost), float((base_edge | size_edge).mean()))


def _table(curves: Mapping[int, Curve], seeds: list[int]) -> tuple[Array, Array]:
    """Return log2 of the values that all seeds have, ascending, and losses [seeds, values]."""
    shared = sorted(set.intersection(*(set(curves[seed]) for seed in seeds)))
    return np.log2(np.array(shared)), np.array([[curves[seed][value] for value in shared] for seed in seeds])


def _optima(x: Array, means: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return where each curve of means [samples, values] is lowest, and whether that is an end of the grid.

    As `optimum.fit`: least squares of a parabola through the best point and its neighbours within an octave.
    """
    best = means.argmin(1)
    places, edges = x[best].copy(), (best == 0) | (best == len(x) - 1)
    for index in range(1, len(x) - 1):
        chosen = np.flatnonzero(best == index)
        near = np.abs(x - x[index]) <= OCTAVE
        near[[index - 1, index + 1]] = True
        a, b, _ = np.polyfit(x[near] - x[index], means[np.ix_(chosen, near)].T, 2)
        bends = a > 0
        vertex = np.where(bends, -b / (2 * np.where(bends, a, 1.0)), 0.0)
        places[chosen] = np.clip(x[index] + vertex, x[near].min(), x[near].max())
    return places, edges


def _read(x: Array, means: Array, places: Array) -> Array:
    """Return each curve of means [samples, values] at its place, by the parabola through the three nearest points."""
    nearest = np.sort(np.argsort(np.abs(x[None] - places[:, None]), axis=1, kind="stable")[:, :3], axis=1)
    points, losses = x[nearest], np.take_along_axis(means, nearest, 1)  # (samples, 3)
    total = np.zeros(len(places))
    for i in range(3):
        weight = np.ones(len(places))
        for j in {0, 1, 2} - {i}:
            weight *= (places - points[:, j]) / (points[:, i] - points[:, j])
        total += weight * losses[:, i]
    return total


def _interval(values: Array) -> Interval:
    low, high = (float(np.percentile(values, share, method="nearest")) for share in PERCENTILES)
    return Interval(low if np.isfinite(low) else None, high if np.isfinite(high) else None)
