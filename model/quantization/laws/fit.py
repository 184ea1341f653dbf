"""Fitting a form to measured losses.

Each form is linear in some constants once the others are given (variable projection, arXiv 2603.22339): a search over
the others alone, with non-negative least squares inside, finds a start. From there all constants move together under
the loss that is wanted, Huber's on log L with delta 1e-3, summed over points (arXiv 2203.15556, 2404.10102).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls
from scipy.stats import qmc

from model.quantization.laws.law import Law
from model.quantization.laws.points import Floats, Points

HUBER = 1e-3  # of log L: errors beyond 0.1 % count linearly
STARTS = 8
POLISHED = 2  # of the starts: those that the search liked best


@dataclass(frozen=True)
class Solution:
    """Constants that fit best, and how well."""

    law: Law
    objective: float
    place: Floats
    """Of the optimum: the constants searched for, then what each linear term adds at a typical point, in nats."""


class Problem:
    """A form and the points it is fitted to; the bounds come from all points, of a resampling, too."""

    def __init__(self, form: type[Law], at: Points, loss: Floats) -> None:
        if len(at) == 0:
            raise ValueError("no points to fit")
        self.form, self.at, self.loss = form, at, loss
        self.ranges = form.search(at)
        low, high = np.array([(found.low, found.high) for found in self.ranges.values()]).T
        self.low, self.high = low, high
        # A form without what its last term is about has columns of zeros
        self.active = tuple(
            name for name, column in zip(form.LINEAR, self._terms(self._middle(), at), strict=True) if column.any()
        )

    def solve(self, starts: int = STARTS, seed: int = 0) -> Solution:
        """The best of several starts."""
        found = sorted((self._project(start) for start in self._starts(starts, seed)), key=lambda pair: pair[0])
        everywhere = np.arange(len(self.at))
        return min(
            (self.polish(place, everywhere) for _, place in found[:POLISHED]), key=lambda solution: solution.objective
        )

    def polish(self, place: Floats, rows: NDArray[np.intp]) -> Solution:
        """All constants together, from `place`, under Huber's loss on the logarithm, over some rows."""
        at, target = self.at[rows], np.log(self.loss[rows])

        def residuals(place: Floats) -> Floats:
            columns, _ = self._scaled(place[: len(self.low)], at)
            return np.log(np.maximum(place[len(self.low) :] @ columns, 1e-9)) - target  # type: ignore[no-any-return]

        most = np.full(len(self.active), 20 * self.loss.max())
        low, high = np.concatenate([self.low, np.zeros(len(most))]), np.concatenate([self.high, most])
        start = np.clip(place, low, high)
        best = least_squares(residuals, start, bounds=(low, high), loss="huber", f_scale=HUBER, x_scale="jac", max_nfev=300)
        return Solution(self._law(best.x), float(best.cost), best.x)

    def at_bounds(self, solution: Solution) -> list[str]:
        """Constants that the bounds of the search hold, with the bound."""
        held = []
        for name, value, found in zip(self.ranges, solution.place, self.ranges.values(), strict=False):
            near = 1e-3 * (found.high - found.low)
            if value - found.low < near or found.high - value < near:
                bound = found.low if value - found.low < near else found.high
                held.append(f"{name} ended at the bound of its search, {bound:g}")
        return held

    def _project(self, start: Floats) -> tuple[float, Floats]:
        """Variable projection: the sum of squared relative errors, and its place."""

        def residuals(values: Floats) -> Floats:
            columns, _ = self._scaled(values, self.at)
            return self._inner(columns) @ columns / self.loss - 1  # type: ignore[no-any-return]

        best = least_squares(residuals, start, bounds=(self.low, self.high), x_scale="jac", max_nfev=60)
        columns, _ = self._scaled(best.x, self.at)
        return float(best.cost), np.concatenate([best.x, self._inner(columns)])

    def _inner(self, columns: Floats) -> Floats:
        """The linear constants, by non-negative least squares on relative errors."""
        rotation, triangle = np.linalg.qr((columns / self.loss).T)
        found: Floats = nnls(triangle, rotation.sum(axis=0))[0]
        return found

    def _scaled(self, values: Floats, at: Points) -> tuple[Floats, Floats]:
        """The active terms, each over its geometric mean, and these means.

        What multiplies a scaled term is nats at a typical point: of order 1, and nearly free of the exponents.
        """
        terms = dict(zip(self.form.LINEAR, self._terms(values, at), strict=True))
        columns = np.stack([terms[name] for name in self.active])
        there = columns > 0
        logs = np.log(columns, out=np.zeros_like(columns), where=there)
        scales: Floats = np.exp(logs.sum(axis=1) / np.maximum(there.sum(axis=1), 1))
        return columns / scales[:, None], scales

    def _terms(self, values: Floats, at: Points) -> tuple[Floats, ...]:
        return self.form.build(dict(zip(self.ranges, map(float, values), strict=True))).terms(at)

    def _law(self, place: Floats) -> Law:
        values, nats = place[: len(self.low)], place[len(self.low) :]
        _, scales = self._scaled(values, self.at)
        linear = dict(zip(self.active, map(float, nats / scales), strict=True))
        return self.form.build({**dict(zip(self.ranges, map(float, values), strict=True)), **linear})

    def _middle(self) -> Floats:
        return np.array([(found.start_low + found.start_high) / 2 for found in self.ranges.values()])

    def _starts(self, count: int, seed: int) -> Sequence[Floats]:
        """The middle of the intervals, and a Latin hypercube over them."""
        low, high = np.array([(found.start_low, found.start_high) for found in self.ranges.values()]).T
        if count == 1:
            return [self._middle()]
        draws = qmc.LatinHypercube(len(low), rng=np.random.default_rng(seed)).random(count - 1)
        return [self._middle(), *(low + draws * (high - low))]


def bootstrap(
    problem: Problem, solution: Solution, runs: NDArray[np.intp], count: int, seed: int = 0
) -> list[Law]:
    """Laws fitted to runs drawn with replacement; the points of one run stay together.

    Args:
        problem: what was solved.
        solution: where each fit starts.
        runs: number of each point's run, from 0.
        count: how many.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    members = [np.flatnonzero(runs == run) for run in range(int(runs.max()) + 1)]
    draws = [generator.integers(len(members), size=len(members)) for _ in range(count)]
    return [problem.polish(solution.place, np.concatenate([members[run] for run in drawn])).law for drawn in draws]


@dataclass(frozen=True)
class Score:
    """How well predictions meet measurements."""

    points: int
    r2: float | None
    """Share of the variance explained; None for fewer than two different losses."""
    mean_absolute_error: float
    """Nats per token."""


def score(predicted: Floats, measured: Floats) -> Score:
    """Of two columns."""
    spread = float(((measured - measured.mean()) ** 2).sum())
    r2 = 1 - float(((predicted - measured) ** 2).sum()) / spread if spread > 0 else None
    return Score(len(measured), r2, float(np.abs(predicted - measured).mean()))
