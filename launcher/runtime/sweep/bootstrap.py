"""Tell how well few seeds know an optimum and the cost of missing it: a bootstrap over seeds.

Each sample draws as many seeds as there are, with replacement, the same ones for both sizes, averages their curves,
finds both optima anew and reads the larger size's curve at both: what the base's value costs there, with the base's own
optimum as uncertain as it is. A cost is reckoned once for each sample and never paired by hand, so it can be negative
only by the curve's own shape. Where a sample has an optimum at an end of its grid, the shift is known to one side at
most; where it is the larger size's, the cost has no upper end, for its least loss may lie beyond. With three to five
seeds the percentiles are narrow: read them as a lower bound of the uncertainty.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plumbline.launcher.runtime.sweep.optimum import Array, Curve, is_within, losses_at, optima

SAMPLES = 10_000
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Interval:
    """Hold the middle 95 % of what the samples give; None: the samples reach beyond a grid, there is no such end."""

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
    (base_best, base_edge), (size_best, size_edge) = optima(x, base_means), optima(y, size_means)
    base_low, base_high = _bounds(x, base_best, base_edge)
    size_low, size_high = _bounds(y, size_best, size_edge)
    lost = losses_at(y, size_means, base_best) - losses_at(y, size_means, size_best)
    lost[~is_within(y, base_best)] = np.inf
    return Intervals(
        _interval(size_low - base_high, size_high - base_low),
        # Of the best that was tried at the base; the size's own optimum, beyond its grid, has less loss than the end
        _interval(lost, np.where(size_edge, np.inf, lost)),
        float((base_edge | size_edge).mean()),
    )


def _bounds(x: Array, best: Array, edge: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return between which places each optimum is: what is best at an end of the grid x may lie anywhere beyond it."""
    return np.where(edge & (best == x[0]), -np.inf, best), np.where(edge & (best == x[-1]), np.inf, best)


def _table(curves: Mapping[int, Curve], seeds: list[int]) -> tuple[Array, Array]:
    """Return log2 of the values that all seeds have, ascending, and losses [seeds, values]."""
    shared = sorted(set.intersection(*(set(curves[seed]) for seed in seeds)))
    return np.log2(np.array(shared)), np.array([[curves[seed][value] for value in shared] for seed in seeds])


def _interval(lowest: Array, highest: Array) -> Interval:
    """Return the percentiles of samples of which each lies between two values."""
    low, high = (
        float(np.percentile(values, share, method="nearest"))
        for values, share in zip((lowest, highest), PERCENTILES, strict=True)
    )
    return Interval(low if np.isfinite(low) else None, high if np.isfinite(high) else None)
