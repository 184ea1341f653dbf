"""Subtract variants from one another seed by seed: what seeds have in common cancels."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plumbline.launcher.runtime.sweep.seed_means import student

OfSeeds = Mapping[str, Mapping[int, float]]
"""Quantity -> seed -> value."""


@dataclass(frozen=True)
class Difference:
    """Hold by how much one variant exceeds another in one quantity."""

    mean: float
    """Mean over the seeds that both have."""
    low: float
    """Lower end of Student's t interval of the mean, 95 %; `high` is the upper end."""
    high: float
    seeds: int

    def __str__(self) -> str:
        """Return the mean and its interval."""
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def differences(variant: OfSeeds, other: OfSeeds) -> dict[str, Difference]:
    """Return by how much a variant exceeds another, for each quantity of which both have two seeds or more."""
    found = {}
    for key in variant.keys() & other.keys():
        both = sorted(variant[key].keys() & other[key].keys())
        if len(both) > 1:
            apart = np.array([variant[key][seed] - other[key][seed] for seed in both])
            found[key] = Difference(float(apart.mean()), *student(apart), seeds=len(both))
    return found
