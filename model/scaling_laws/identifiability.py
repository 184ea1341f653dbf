"""Warn of constants that the points do not determine, or only in combination."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plumbline.model.scaling_laws.points import Floats
from plumbline.model.scaling_laws.solver import Problem, Solution

SILENT = 1e-6  # largest change of log L if a constant changes by its value; rounding of differences is below 1e-9
SINGULAR = 1e-6  # relative to the largest singular value, for columns of unit length
DEGENERATE = 0.95  # correlation of two searched constants
OUTLIER = 5.0  # standard deviations
POOR = 0.5  # standard error of a constant, relative to its value
APART = 3.0  # standard errors by which two exponents differ
NOTICEABLE = 0.02  # difference of two exponents, relative to their mean, if there is no noise
NOTHING = 1e-6  # nats


@dataclass(frozen=True)
class Judgement:
    """Hold what the points do not tell about a solution."""

    warnings: Sequence[str]
    """In words; shortcomings of the points themselves are in `Law.cautions`."""
    undetermined: frozenset[str]
    """Constants that are not identified or poorly determined, so no answer may depend on them."""


def judge(problem: Problem, solution: Solution) -> Judgement:
    """Judge a solution by the Gauss-Newton curvature of log L at the optimum.

    Constants are judged as they were searched for: an f by gamma and its zero gamma x n.
    """
    notes = _bounds(problem, solution)
    curvature = _Curvature(problem, solution)
    names = np.array(problem.names)
    unidentified = names[~curvature.identified].tolist()
    if unidentified:
        notes.append(f"{', '.join(unidentified)}: not identified; the points fit as well with others")
    points, constants = len(problem.loss), len(problem.names)
    if points <= constants:
        notes.append(f"{points} points for {constants} constants: the fit goes through the points, whatever they say")
        return Judgement(notes, frozenset(unidentified))
    notes += _pairs(problem, curvature)
    errors = np.sqrt(np.diag(curvature.covariance))
    searched = zip(problem.ranges, solution.place, errors, curvature.identified, strict=False)
    poor = {
        name: f"{name} = {value:.3g} has a standard error of {error:.2g}: poorly determined"
        for name, value, error, identified in searched
        if identified and not name.startswith("zero_") and error > POOR * abs(value)
    }
    return Judgement([*notes, *poor.values()], frozenset([*unidentified, *poor]))


def exponents_apart(problem: Problem, solution: Solution) -> list[str]:
    """Return a warning if a form has alpha = beta but the points call for two different exponents."""
    free = problem.untied(solution)
    if free is None or len(problem.loss) <= len(problem.names) + 1:
        return []
    untied, found = free
    curvature = _Curvature(untied, found)
    first, second = untied.names.index("alpha"), untied.names.index("beta")
    if not (curvature.identified[first] and curvature.identified[second]):
        return []
    alpha, beta = found.place[first], found.place[second]
    covariance = curvature.covariance
    error = np.sqrt(covariance[first, first] + covariance[second, second] - 2 * covariance[first, second])
    if abs(alpha - beta) <= max(APART * error, NOTICEABLE * (alpha + beta) / 2):
        return []
    return [
        f"this form has alpha = beta, and with two exponents the points ask for alpha = {alpha:.3g} and beta = "
        f"{beta:.3g} (standard error of the difference {error:.2g}): do not trust what follows from A, B and alpha"
    ]


class _Curvature:
    """Propagate errors of the points to the constants of a solution."""

    identified: NDArray[np.bool_]
    """Constants that change the losses, each in a way that the others cannot compensate."""
    spread: Floats
    """Covariance of the constants for errors of log L with variance 1, in the directions that the points constrain."""
    covariance: Floats
    """The same for the actual errors of the points."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        slopes = problem.sensitivity(solution)
        # Before normalising columns: the rounding errors of a zero column would look like any other column
        moves = np.abs(slopes) * np.maximum(np.abs(solution.place), 0.1) > SILENT
        heard = np.flatnonzero(moves.any(axis=0))
        lengths = np.linalg.norm(slopes[:, heard], axis=0)
        _, sizes, directions = np.linalg.svd(slopes[:, heard] / lengths)
        strengths = np.zeros(len(heard))  # with fewer points than constants, 0 in the remaining directions
        strengths[: len(sizes)] = sizes
        seen = strengths > SINGULAR * strengths.max(initial=0.0)
        self.identified = np.zeros(len(problem.names), bool)
        self.identified[heard] = ~(np.abs(directions[~seen]) > 0.1).any(axis=0)
        inverse = np.zeros((len(problem.names), len(problem.loss)))  # of the slopes
        scaled = directions[seen] / strengths[seen, None]
        inverse[heard] = (scaled.T @ scaled @ (slopes[:, heard] / lengths).T) / lengths[:, None]
        self.spread = inverse @ inverse.T
        self.covariance = (inverse * _noise(problem, solution, moves) ** 2) @ inverse.T


def _noise(problem: Problem, solution: Solution, moves: NDArray[np.bool_]) -> Floats:
    """Return the standard deviation of each point's error of log L; `moves` tells which constants affect which point.

    Points compared with their checkpoint have a different error from runs, often a tenth of it. An outlier counts as
    five deviations at most, since a fit under Huber's loss hardly follows it.
    """
    errors, noise = np.abs(problem.errors(solution)), np.zeros(len(problem.loss))
    for kind in (problem.paired, ~problem.paired):
        if kind.any():
            most = OUTLIER * 1.4826 * np.median(errors[kind])
            left = max(int(kind.sum() - moves[kind].any(axis=0).sum()), 1)  # degrees of freedom
            noise[kind] = np.sqrt((np.minimum(errors[kind], most) ** 2).sum() / left)
    return noise


def _bounds(problem: Problem, solution: Solution) -> list[str]:
    notes = []
    for name, value, interval in zip(problem.ranges, solution.place, problem.ranges.values(), strict=False):
        near = 1e-3 * (interval.high - interval.low)
        if min(value - interval.low, interval.high - value) < near:
            bound = interval.low if value - interval.low < near else interval.high
            index = name.removeprefix("zero_")
            label = name if index == name else f"gamma_{index} x n_{index}"
            notes.append(f"{label} ended at the bound of its search, {bound:g}")
    nats = zip(problem.active, solution.place[len(problem.ranges) :], strict=True)  # of each term at a typical point
    return notes + [f"{name} ended at 0: the points ask for no such term" for name, size in nats if size < NOTHING]


def _pairs(problem: Problem, curvature: _Curvature) -> list[str]:
    spread, searched = curvature.spread, list(problem.ranges)
    notes = []
    for second, name in enumerate(searched):
        for first, other in enumerate(searched[:second]):
            if not (curvature.identified[first] and curvature.identified[second]):
                continue
            correlation = spread[first, second] / np.sqrt(spread[first, first] * spread[second, second])
            if abs(correlation) > DEGENERATE:
                advice = (
                    f"read the curve f_{other[6:]}(P) instead" if name == f"zero_{other[6:]}" else "do not read them"
                )
                pair = f"{other} and {name.replace('zero_', 'n_')}"
                notes.append(f"{pair} are nearly degenerate (correlation {correlation:.3f}): {advice}")
    return notes
