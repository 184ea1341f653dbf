"""Search for the constants of a form.

Each form is linear in some constants once the others are given, so a search over the others alone, with non-negative
least squares inside (variable projection, arXiv 2603.22339), finds a start. From there all constants are fitted
together under the final loss, Huber's on log L with delta 1e-3, summed over points (arXiv 2203.15556, 2404.10102).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls
from scipy.stats import qmc

from plumbline.model.scaling_laws.law import Law, Range
from plumbline.model.scaling_laws.measured import Measured
from plumbline.model.scaling_laws.points import Floats

HUBER = 1e-3  # of log L: errors beyond 0.1 % count linearly
CONTINUATION = (1e-1, 3e-2, 1e-2, 3e-3, HUBER)
STARTS = 8
POLISHED = 2  # number of best starts to polish


@dataclass(frozen=True)
class Solution:
    """Hold the best-fitting constants, and the quality of the fit."""

    law: Law
    objective: float
    place: Floats
    """The optimum: the searched constants, then the contribution of each linear term at a typical point, in nats."""


class Problem:
    """Define a fit: a form, the points, and the ranges of its constants.

    A checkpoint whose loss is low by chance is equally lucky after quantization. So if a checkpoint was measured, its
    quantized points are compared with it: their error is that of the ratio of the two losses.
    """

    def __init__(self, form: type[Law], measured: Measured, ranges: dict[str, Range]) -> None:
        self.form, self.at, self.loss, self.ranges = form, measured.at, measured.loss, ranges
        self._measured = measured
        self._checkpoints = measured.checkpoints()
        self.paired = self._checkpoints >= 0
        low, high = np.array([(interval.low, interval.high) for interval in self.ranges.values()]).T
        self.low, self.high = low, high
        # A term that does not apply to any point is a column of zeros
        self.active = tuple(
            name for name, column in zip(form.LINEAR, self._terms(self._middle()), strict=True) if column.any()
        )

    def solve(self, seed: int) -> Solution:
        """Return the best solution of several starts."""
        candidates = sorted((self._project(start) for start in self._starts(seed)), key=lambda pair: pair[0])
        everywhere = np.arange(len(self.at))
        return min(
            (self.polish(place, everywhere) for _, place in candidates[:POLISHED]),
            key=lambda solution: solution.objective,
        )

    def polish(self, place: Floats, rows: NDArray[np.intp]) -> Solution:
        """Fit all constants together, starting at `place`, under Huber's loss on the logarithm, over some rows."""
        target = np.log(self.loss)

        def residuals(place: Floats) -> Floats:
            return self._from_checkpoint(self._logarithm(place) - target)[rows]

        most = np.full(len(self.active), 20 * self.loss.max())
        low, high = np.concatenate([self.low, np.zeros(len(most))]), np.concatenate([self.high, most])
        # Linear errors have no curvature to follow, so start with a wider quadratic region and narrow it
        for width in CONTINUATION:
            best = least_squares(
                residuals,
                np.clip(place, low, high),
                bounds=(low, high),
                loss="huber",
                f_scale=width,
                x_scale="jac",
                max_nfev=100,
            )
            place = best.x
        return Solution(self._law(place), float(best.cost), place)

    def untied(self, solution: Solution) -> tuple["Problem", Solution] | None:
        """Return the problem with a free beta, and its solution from here, or None if the form already has one."""
        if not self.form.TIED:
            return None
        free = Problem(self.form, self._measured, {**self.ranges, "beta": self.ranges["alpha"]})
        place = np.insert(solution.place, len(self.ranges), solution.law.beta)
        return free, free.polish(place, np.arange(len(self.at)))

    def sensitivity(self, solution: Solution) -> Floats:
        """Return the slopes d log L / d constant at the solution: (points, constants in the order of `names`)."""
        slopes = []
        for index, value in enumerate(solution.place):
            # Step away from the nearer bound, at which an f may end
            step = np.zeros(len(solution.place))
            step[index] = -1e-5 * max(abs(value), 0.1)
            change = self._logarithm(solution.place + step) - self._logarithm(solution.place)
            slopes.append(self._from_checkpoint(change) / step[index])
        return np.stack(slopes, axis=1)

    def errors(self, solution: Solution) -> Floats:
        """Return the errors of log L, as the fit counts them."""
        return self._from_checkpoint(self._logarithm(solution.place) - np.log(self.loss))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the entries of `Solution.place`."""
        return (*self.ranges, *self.active)

    def _project(self, start: Floats) -> tuple[float, Floats]:
        """Search by variable projection; return the least sum of squared relative errors and where it is."""

        def residuals(values: Floats) -> Floats:
            columns, _ = self._scaled(values)
            return self._from_checkpoint(self._inner(columns) @ columns / self.loss - 1)

        best = least_squares(residuals, start, bounds=(self.low, self.high), x_scale="jac", max_nfev=60)
        columns, _ = self._scaled(best.x)
        return float(best.cost), np.concatenate([best.x, self._inner(columns)])

    def _inner(self, columns: Floats) -> Floats:
        """Return the linear constants, by non-negative least squares on relative errors."""
        rows = np.stack([self._from_checkpoint(column / self.loss) for column in columns], axis=1)
        rotation, triangle = np.linalg.qr(rows)
        constants: Floats = nnls(triangle, self._from_checkpoint(np.ones(len(self.loss))) @ rotation)[0]
        return constants

    def _from_checkpoint(self, values: Floats) -> Floats:
        """Subtract from the values of points quantized after training those of their checkpoints; keep the others."""
        return values - np.where(self.paired, values[self._checkpoints], 0.0)

    def _logarithm(self, place: Floats) -> Floats:
        """Return log L of all points."""
        columns, _ = self._scaled(place[: len(self.low)])
        return np.log(np.maximum(place[len(self.low) :] @ columns, 1e-9))

    def _scaled(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the active terms, each over its geometric mean, and these means.

        The coefficient of a scaled term is then in nats at a typical point: of order 1, and nearly independent of the
        exponents.
        """
        terms = dict(zip(self.form.LINEAR, self._terms(values), strict=True))
        columns = np.stack([terms[name] for name in self.active])
        there = columns > 0
        logs = np.log(columns, out=np.zeros_like(columns), where=there)
        scales: Floats = np.exp(logs.sum(axis=1) / np.maximum(there.sum(axis=1), 1))
        return columns / scales[:, None], scales

    def _terms(self, values: Floats) -> tuple[Floats, ...]:
        return self.form.build(dict(zip(self.ranges, map(float, values), strict=True))).terms(self.at)

    def _law(self, place: Floats) -> Law:
        values, nats = place[: len(self.low)], place[len(self.low) :]
        _, scales = self._scaled(values)
        linear = dict(zip(self.active, map(float, nats / scales), strict=True))
        return self.form.build({**dict(zip(self.ranges, map(float, values), strict=True)), **linear})

    def _middle(self) -> Floats:
        return np.array([(interval.start_low + interval.start_high) / 2 for interval in self.ranges.values()])

    def _starts(self, seed: int) -> Sequence[Floats]:
        """Return the middle of the intervals, and a Latin hypercube over them."""
        low, high = np.array([(interval.start_low, interval.start_high) for interval in self.ranges.values()]).T
        draws = qmc.LatinHypercube(len(low), rng=np.random.default_rng(seed)).random(STARTS - 1)
        return [self._middle(), *(low + draws * (high - low))]
