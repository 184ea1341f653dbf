"""Fit a form to measured runs: its constants, their uncertainty, and how well it predicts held-out points."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plumbline.model.scaling_laws.identifiability import exponents_apart, judge
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.measured import Measured
from plumbline.model.scaling_laws.points import Floats
from plumbline.model.scaling_laws.solver import Problem, Solution

LARGEST = {"largest-parameters": "parameters", "largest-tokens": "tokens"}
BAND = (2.5, 97.5)  # percent


@dataclass(frozen=True)
class Score:
    """Hold how well predictions match measurements."""

    points: int
    r2: float | None
    """Share of the variance explained, or None with fewer than two different values."""
    mean_absolute_error: float
    """Nats per token."""


@dataclass(frozen=True)
class Fit:
    """Hold a fitted law with its training points and those held out."""

    problem: Problem
    solution: Solution
    train: Measured
    held_out: Measured
    warnings: Sequence[str]
    undetermined: frozenset[str]
    """Constants that are not identified or poorly determined, so no answer may depend on them."""

    @property
    def law(self) -> Law:
        """Return the law with the fitted constants."""
        return self.solution.law

    def bootstrap(self, count: int, seed: int = 0) -> Iterator[Law]:
        """Yield laws fitted to runs drawn with replacement; the points of one run stay together."""
        generator = np.random.default_rng(seed)
        members = [np.flatnonzero(self.train.runs == run) for run in np.unique(self.train.runs)]
        for _ in range(count):
            drawn = generator.integers(len(members), size=len(members))
            rows = np.concatenate([members[run] for run in drawn])
            yield self.problem.polish(self.solution.place, rows).law


def fit(form: type[Law], measured: Measured, hold_out: str | None = None, seed: int = 0) -> Fit:
    """Fit a form to the points that are not held out.

    Raises:
        ValueError: nothing is left to fit or to hold out, or the points lack what the form needs.
    """
    held = held_out(measured, hold_out, seed)
    train = measured[~held]
    _check_left(form, measured, train, hold_out)
    # Bounds come from all points, since held-out points must have a prediction, too
    problem = Problem(form, train, form.search(measured.at))
    solution = problem.solve(seed=seed)
    judgement = judge(problem, solution)
    warnings = [*form.cautions(train.at), *judgement.warnings, *exponents_apart(problem, solution)]
    return Fit(problem, solution, train, measured[held], warnings, judgement.undetermined)


def _check_left(form: type[Law], measured: Measured, train: Measured, hold_out: str | None) -> None:
    """Refuse a hold-out that leaves one of several bit widths: the law would have no constants for the others.

    Raises:
        ValueError: names the hold-out and what it removes.
    """
    for column in ("weight_bits", "activation_bits", "kv_bits", "post_bits"):
        values, left = np.unique(getattr(measured.at, column)), np.unique(getattr(train.at, column))
        if column in form.USES and len(values) > len(left) == 1:
            taken = ", ".join(f"{value:g}" for value in values if value != left[0])
            raise ValueError(
                f"hold-out {hold_out}: takes away every point of {column} {taken} and leaves {left[0]:g} alone (inf: "
                "not quantized), so what bits cost cannot be fitted; hold out other points, or measure more"
            )


def held_out(measured: Measured, how: str | None, seed: int = 0) -> NDArray[np.bool_]:
    """Return flags for the points to hold out of a fit.

    Args:
        measured: all points.
        how: a share of the runs such as "0.2", drawn at random; "largest-parameters" or "largest-tokens"; None holds
            out none.
        seed: seed of the draw.

    Raises:
        ValueError: `how` is unknown, or nothing would be left on one side.
    """
    if how is None:
        return np.zeros(len(measured.at), bool)
    if how in LARGEST:
        column = getattr(measured.at, LARGEST[how])
        held: NDArray[np.bool_] = column == column.max()
    else:
        runs = np.random.default_rng(seed).permutation(np.unique(measured.runs))
        held = np.isin(measured.runs, runs[: round(_share(how) * len(runs))])
    if held.all() or not held.any():
        raise ValueError(f"hold-out {how}: holds out {held.sum()} of {len(held)} points; both sides need some")
    return held


def _share(how: str) -> float:
    try:
        share = float(how)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ValueError(f"hold-out {how!r}: a share between 0 and 1, or one of {', '.join(LARGEST)}")
    return share


def score(predicted: Floats, measured: Floats) -> Score:
    """Score a column of predictions against a column of measurements."""
    spread = float(((measured - measured.mean()) ** 2).sum())
    r2 = 1 - float(((predicted - measured) ** 2).sum()) / spread if spread > 0 else None
    return Score(len(measured), r2, float(np.abs(predicted - measured).mean()))


def bands(laws: Sequence[Law]) -> dict[str, tuple[float, float]]:
    """Return the middle 95 % of each constant over bootstrapped laws, without constants that never change."""
    columns = {name: [law.constants[name] for law in laws] for name in laws[0].constants} if laws else {}
    percentiles = {name: np.percentile(values, BAND) for name, values in columns.items() if len(set(values)) > 1}
    return {name: (float(low), float(high)) for name, (low, high) in percentiles.items()}
