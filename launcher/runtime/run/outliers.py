"""Separate outliers from noise by median and median absolute deviation, which outliers hardly affect."""

from collections.abc import Sequence
from statistics import median

NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


def usual_range(values: Sequence[float], deviations: float, least: float) -> tuple[float, float]:
    """Return the median of some values, and the largest value that is still usual among them.

    Args:
        values: usual values; finite.
        deviations: robust standard deviations above the median that are still usual.
        least: smallest distance above the median that is still usual.
    """
    middle = median(values)
    spread = NORMAL * median(abs(value - middle) for value in values)
    return middle, middle + max(deviations * spread, least)
