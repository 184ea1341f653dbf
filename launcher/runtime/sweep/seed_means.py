"""Compute means over seeds and their errors."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special


class Estimate(NamedTuple):
    """Hold a mean over seeds and its error; a pair in JSON."""

    mean: float
    error: float | None
    """Standard error of the mean, or None for fewer than two values."""


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of values and its standard error."""
    return Estimate(mean(values), standard_error(values))


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, or NaN of no values."""
    return sum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean from the sample's scatter, or None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    variance = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def student(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval of the mean of two or more values."""
    centre, error = values.mean(), values.std(ddof=1) / np.sqrt(len(values))
    half = special.stdtrit(len(values) - 1, 0.975) * error
    return float(centre - half), float(centre + half)
