"""Tell what is unusual from what is noise, by median and median absolute deviation, which outliers do not move."""

from collections.abc import Sequence
from statistics import median

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def usual_range(values: Sequence[float], deviations: float, least: float) -> tuple[float, float]:
    """Return the median of some values, and the largest value that is not unusual beside them.

    Args:
        values: what is usual; finite.
        deviations: robust standard deviations above the median that are.
        least: and at least so much above it.
    """
    middle = median(values)
    spread = NORMAL * median(abs(value - middle) for value in values)
    return middle, middle + max(deviations * spread, least)
