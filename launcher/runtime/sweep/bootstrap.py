"""Estimate the uncertainty of an optimum, and of the cost of missing it, by a bootstrap over seeds.

Each sample draws as many seeds as there are, with replacement and the same for both sizes, averages their curves, finds
both optima again and reads the larger size's curve at both. That gives the cost of the base's value, including the
uncertainty of the base's own optimum. A cost is computed once per sample and never paired by hand, so only the shape of
the curve can make it negative. If a sample has an optimum at an end of its grid, the shift is only bounded on one side;
if that is the larger size's, the cost has no upper bound, since the least loss may lie beyond.

With few seeds the percentiles are too narrow: for the mean of a normal variable the nominal 95 % cover about 75 % with
three seeds and 83 % with five. So Student's t interval of the mean over seeds stands beside them, for each seed's own
shift and cost. It is wider, and assumes that these are normal. A seed's own cost is hardly ever negative and counts the
noise of its two optima, so its mean lies above the cost on the seed-mean curve.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plumbline.launcher.runtime.sweep.optimum import Array, Curve, is_within, losses_at, optima
from plumbline.launcher.runtime.sweep.seed_means import student

SAMPLES = 10_000
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Interval:
    """Hold two ends; None for an end that lies beyond a grid."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Intervals:
    """Hold the intervals of one size relative to the base."""

    shift: Interval
    """Octaves from the base's optimum to this size's: the middle 95 % over the samples."""
    penalty: Interval
    """Nats lost at the base's optimum, likewise."""
    unresolved: float
    """Share of samples in which one of the two optima is at an end of its grid."""
    seeds: int
    """Number of seeds that both sizes have."""
    shift_t: Interval | None
    """Student's t interval of the mean shift over seeds, 95 %; None if a seed's optimum is at an end of its grid."""
    penalty_t: Interval | None
    """The same of the mean over seeds of each one's own cost; None, too, if a base's optimum is outside this grid."""


def intervals(base: Mapping[int, Curve], size: Mapping[int, Curve], samples: int = SAMPLES) -> Intervals | None:
    """Return intervals of shift and penalty, or None with fewer than two common seeds, or three values of each.

    Args:
        base: seed -> its curve at the base size.
        size: the same for another size.
        samples: number of samples; the drawing is deterministic.
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
    shift_t, penalty_t = _over_seeds(x, base_losses, y, size_losses)
    return Intervals(
        _interval(size_low - base_high, size_high - base_low),
        # At the best value tried at the base; the size's own optimum, beyond its grid, has less loss than the end
        _interval(lost, np.where(size_edge, np.inf, lost)),
        float((base_edge | size_edge).mean()),
        len(seeds),
        shift_t,
        penalty_t,
    )


def _over_seeds(x: Array, base_losses: Array, y: Array, size_losses: Array) -> tuple[Interval | None, Interval | None]:
    """Return the t intervals of each seed's own shift and cost, where no optimum is at an end of its grid."""
    (base_best, base_edge), (size_best, size_edge) = optima(x, base_losses), optima(y, size_losses)
    if (base_edge | size_edge).any():
        return None, None
    shift_t = Interval(*student(size_best - base_best))
    if not is_within(y, base_best).all():
        return shift_t, None
    costs = losses_at(y, size_losses, base_best) - losses_at(y, size_losses, size_best)
    return shift_t, Interval(*student(costs))


def _bounds(x: Array, best: Array, edge: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return bounds on the position of each optimum: if the best point is at an end of the grid x, it may be beyond."""
    return np.where(edge & (best == x[0]), -np.inf, best), np.where(edge & (best == x[-1]), np.inf, best)


def _table(curves: Mapping[int, Curve], seeds: list[int]) -> tuple[Array, Array]:
    """Return log2 of the values that all seeds have, ascending, and losses [seeds, values]."""
    shared = sorted(set.intersection(*(set(curves[seed]) for seed in seeds)))
    return np.log2(np.array(shared)), np.array([[curves[seed][value] for value in shared] for seed in seeds])


def _interval(lowest: Array, highest: Array) -> Interval:
    """Return the percentiles of samples that are each known to lie between two values."""
    low, high = (
        float(np.percentile(values, share, method="nearest"))
        for values, share in zip((lowest, highest), PERCENTILES, strict=True)
    )
    return Interval(low if np.isfinite(low) else None, high if np.isfinite(high) else None)
