"""Warn of constants that a fit could not find out: the points leave them open, or determine them only together."""

import numpy as np

from plumbline.model.scaling_laws.points import Floats
from plumbline.model.scaling_laws.solver import Problem, Solution

SINGULAR = 1e-6  # of the largest singular value, of columns of unit length
DEGENERATE = 0.95  # correlation of two constants of the search
POOR = 0.5  # standard error of a constant, of its value
NOTHING = 1e-6  # nats


def cautions(problem: Problem, solution: Solution) -> list[str]:
    """Return warnings about a solution, in words; the points' own shortcomings are in `Law.cautions`.

    From the Gauss-Newton curvature of log L at the optimum. A pair is judged as it was searched for: an f by gamma and
    its zero gamma x n.
    """
    notes = _bounds(problem, solution)
    points, constants = len(problem.loss), len(problem.names)
    if points <= constants:
        notes.append(f"{points} points for {constants} constants: the fit goes through the points, whatever they say")
        return notes
    slopes = problem.sensitivity(solution)
    lengths = np.linalg.norm(slopes, axis=0)
    unit = slopes / np.where(lengths > 0, lengths, 1.0)
    _, sizes, directions = np.linalg.svd(unit, full_matrices=False)
    mixed = {
        name
        for size, direction in zip(sizes, directions, strict=True)
        if size < SINGULAR * sizes[0]
        for name, part in zip(problem.names, direction, strict=True)
        if abs(part) > 0.1
    }
    if mixed:
        names = ", ".join(name for name in problem.names if name in mixed)
        notes.append(f"{names}: not identified; the points fit as well with others")
        return notes
    spread = np.linalg.inv(unit.T @ unit)
    return [*notes, *_pairs(problem, spread), *_poor(problem, solution, np.sqrt(np.diag(spread)) / lengths)]


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


def _pairs(problem: Problem, spread: Floats) -> list[str]:
    errors = np.sqrt(np.diag(spread))
    correlation = spread / np.outer(errors, errors)
    searched = list(problem.ranges)
    notes = []
    for second, name in enumerate(searched):
        for first, other in enumerate(searched[:second]):
            if abs(correlation[first, second]) > DEGENERATE:
                advice = (
                    f"read the curve f_{other[6:]}(P) instead" if name == f"zero_{other[6:]}" else "do not read them"
                )
                pair = f"{other} and {name.replace('zero_', 'n_')}"
                notes.append(f"{pair} are nearly degenerate (correlation {correlation[first, second]:.3f}): {advice}")
    return notes


def _poor(problem: Problem, solution: Solution, errors: Floats) -> list[str]:
    residuals = problem.errors(solution)
    noise = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    named = zip(problem.ranges, solution.place, noise * errors, strict=False)
    return [
        f"{name} = {value:.3g} has a standard error of {error:.2g}: poorly determined"
        for name, value, error in named
        if not name.startswith("zero_") and error > POOR * abs(value)
    ]
