"""Intervals of shift and penalty: right for curves whose optimum is known, honest about what they cannot see."""

import numpy as np
import pytest

from plumbline.launcher.runtime.sweep.bootstrap import Interval, Intervals, intervals
from plumbline.launcher.runtime.sweep.optimum import fit, loss_at

X = range(-12, -5)


def curves(best: float, noise: float = 0.0, seeds: int = 5, draw: int = 0) -> dict[int, dict[float, float]]:
    """Return parabolas of curvature 0.05 in octaves, whose places scatter over seeds."""
    generator = np.random.default_rng(draw)
    places = best + noise * generator.standard_normal(seeds)
    return {seed: {2.0**x: 3 + 0.05 * (x - places[seed]) ** 2 for x in X} for seed in range(seeds)}


def found(base: dict[int, dict[float, float]], size: dict[int, dict[float, float]]) -> Intervals:
    result = intervals(base, size, samples=2000)
    assert result is not None
    return result


def test_without_scatter_the_interval_is_the_truth() -> None:
    result = found(curves(-8.0), curves(-9.5))
    assert (result.shift.low, result.shift.high) == pytest.approx((-1.5, -1.5), abs=1e-9)
    assert (result.penalty.low, result.penalty.high) == pytest.approx((0.05 * 1.5**2,) * 2, abs=1e-9)
    assert result.unresolved == 0.0


def test_the_bases_own_optimum_is_as_uncertain_as_it_is() -> None:
    """A size whose optimum is exactly known has a wide interval if the base's is not."""
    result = found(curves(-8.0, noise=0.5), curves(-8.0))
    assert result.shift.low is not None
    assert result.shift.high is not None
    assert 0.2 < result.shift.high - result.shift.low < 2.0
    assert result.penalty.high is not None
    assert result.penalty.high > 0.001


def test_seeds_are_paired() -> None:
    """Where each seed has the same offset in both sizes, no sample sees a shift."""
    result = found(curves(-8.0, noise=0.5), curves(-8.0, noise=0.5))
    assert (result.shift.low, result.shift.high) == pytest.approx((0, 0), abs=1e-9)
    assert result.penalty.high == pytest.approx(0, abs=1e-9)


def test_most_intervals_hold_the_true_shift() -> None:
    inside = 0
    for draw in range(40):
        result = found(curves(-8.0, 0.3, seeds=8, draw=draw), curves(-8.4, 0.3, seeds=8, draw=100 + draw))
        assert result.shift.low is not None
        assert result.shift.high is not None
        inside += result.shift.low <= -0.4 <= result.shift.high
    assert 32 <= inside <= 40


def test_an_optimum_beyond_the_grid_has_no_upper_end() -> None:
    short = {seed: {lr: loss for lr, loss in curve.items() if lr > 2.0**-7.5} for seed, curve in curves(-6.2).items()}
    result = found(curves(-10.0), {seed: {**curve, 2.0**-5: 3.1} for seed, curve in short.items()})
    assert result.penalty.high is None
    assert found(curves(-8.0), curves(-14.0)).unresolved == 1.0


def test_samples_at_the_end_of_a_grid_bound_shift_and_cost_to_one_side() -> None:
    inside, above, below = curves(-8.0, 0.1), curves(-2.0, 0.1), curves(-14.0, 0.1)
    size_beyond = found(inside, above)
    assert size_beyond.shift.low == pytest.approx(2.0, abs=0.3), "from the base's optimum to the end of the grid"
    assert size_beyond.penalty.low == pytest.approx(0.05 * (6.0**2 - 4.0**2), abs=0.1)
    assert (size_beyond.shift.high, size_beyond.penalty.high) == (None, None)
    base_beyond = found(below, inside)
    assert base_beyond.shift.low == pytest.approx(4.0, abs=0.3)
    assert base_beyond.shift.high is None
    assert base_beyond.penalty.low == pytest.approx(base_beyond.penalty.high, abs=0.1), "of the best that was tried"
    for same_end in (above, below):
        assert found(same_end, same_end).shift == Interval(None, None)


def test_samples_at_the_end_decide_no_end_of_an_interval_that_they_are_not_at() -> None:
    """One seed of two at the upper end of the grid leaves the lower end of the interval what it was."""
    base, size = curves(-8.0, 0.1, seeds=2), curves(-9.0, 0.1, seeds=2)
    size[1] = curves(-4.0)[1]
    result = found(base, size)
    assert 0.7 < result.unresolved < 0.8, "all samples but those of the other seed alone"
    assert result.shift.low == pytest.approx(-1.0, abs=0.3)
    assert result.shift.high is None


def test_it_finds_what_the_table_does() -> None:
    base, size = curves(-8.3, 0.4, seeds=1), curves(-9.1, 0.4, seeds=1, draw=1)
    twice = [{1: curve[0], 2: curve[0]} for curve in (base, size)]
    result = found(*twice)
    (here, _), (there, _) = fit(base[0]), fit(size[0])
    assert result.shift.low == pytest.approx(there - here)
    at_base, at_own = loss_at(size[0], here), loss_at(size[0], there)
    assert at_base is not None
    assert at_own is not None
    assert result.penalty.low == pytest.approx(at_base - at_own)


@pytest.mark.parametrize(("seeds", "covered"), [(3, 0.75), (5, 0.83)])
def test_students_interval_holds_the_true_shift_as_often_as_it_says(seeds: int, covered: float) -> None:
    """The t interval covers 95 % of normal draws; the bootstrap's percentiles cover less."""
    student_hits = bootstrap_hits = 0
    for draw in range(200):
        result = intervals(curves(-8.0, 0.2, seeds, draw), curves(-8.4, 0.2, seeds, 1000 + draw), 500)
        assert result is not None
        assert result.seeds == seeds
        assert result.shift_t is not None
        ends = result.shift.low, result.shift.high, result.shift_t.low, result.shift_t.high
        low, high, low_t, high_t = (end for end in ends if end is not None)
        bootstrap_hits += low <= -0.4 <= high
        student_hits += low_t <= -0.4 <= high_t
    assert student_hits >= 182, "95 % less 2.6 standard errors"
    assert bootstrap_hits / 200 == pytest.approx(covered, abs=0.08)


def test_students_interval_is_of_each_seeds_own_shift_and_cost() -> None:
    places = [0.2, 0.4, 0.9]
    size = {seed: curves(-8.0 + place, seeds=1)[0] for seed, place in enumerate(places)}
    result = found(curves(-8.0, seeds=3), size)
    for interval, values in ((result.shift_t, places), (result.penalty_t, [0.05 * place**2 for place in places])):
        assert interval is not None
        half = 4.302653 * float(np.std(values, ddof=1)) / 3**0.5
        assert (interval.low, interval.high) == pytest.approx(
            (np.mean(values) - half, np.mean(values) + half), abs=1e-6
        )


def test_a_seed_at_the_end_of_its_grid_leaves_no_students_interval() -> None:
    size = {**curves(-9.0, 0.1, seeds=2), 1: curves(-4.0)[1]}
    result = found(curves(-8.0, 0.1, seeds=2), size)
    assert (result.shift_t, result.penalty_t) == (None, None)
    upper = {seed: {lr: loss for lr, loss in curve.items() if lr > 2.0**-9.5} for seed, curve in curves(-8.0).items()}
    beyond = found(curves(-10.5), upper)
    assert beyond.penalty_t is None
    assert beyond.shift_t is not None
    assert beyond.shift_t.low == pytest.approx(2.5)


@pytest.mark.parametrize("seeds", [0, 1])
def test_fewer_than_two_seeds_have_no_interval(seeds: int) -> None:
    assert intervals(curves(-8.0, seeds=seeds), curves(-8.0)) is None
