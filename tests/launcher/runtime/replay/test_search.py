"""Halving finds exactly the samples that cause a spike, in as few measurements as it promises."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import pytest

from plumbline.launcher.runtime.replay.search import MOST, Found, Usual, search, usual
from plumbline.launcher.runtime.replay.spike import Standing
from plumbline.launcher.runtime.run.chain import Step


class Gradients:
    """Hold gradients of samples, of unit length in their own directions, and those of poison, much longer."""

    def __init__(self, size: int, poisons: Sequence[int], length: float, seed: int) -> None:
        rng = random.Random(seed)
        self.vectors = {
            sample: [rng.gauss(0, length if sample in poisons else 1) for _ in range(256)] for sample in range(size)
        }
        self.measured = 0

    def norm(self, samples: Sequence[int]) -> float:
        """Return the norm of the mean gradient of these samples, as a step on them alone reports it."""
        self.measured += 1
        sums = [sum(column) for column in zip(*(self.vectors[sample] for sample in samples), strict=True)]
        return math.sqrt(sum(value * value for value in sums)) / len(samples)


def find(gradients: Gradients) -> Found:
    size = len(gradients.vectors)
    ordinary = 16 / math.sqrt(size)
    spike = Standing("grad_norm", 99.0, Usual(ordinary, 1.5 * ordinary))

    def carries(samples: Sequence[int]) -> bool:
        return spike.carries(Step(1, "", 0.0, gradients.norm(samples)), len(samples) / size)

    return search(range(size), gradients.norm(range(size)), gradients.norm, carries, spike.usual)


@pytest.mark.parametrize("size", [8, 24, 64, 256])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_poison_is_found_and_nothing_else(size: int, count: int) -> None:
    for seed in range(5):
        poisons = sorted(random.Random(seed).sample(range(size), count))
        gradients = Gradients(size, poisons, 3 * math.sqrt(size), seed)
        found = find(gradients)
        assert (sorted(found.causes), found.explained) == (poisons, True)
        assert found.tests == gradients.measured - 1 <= count * (math.ceil(math.log2(size)) + 2)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_found(broken: float) -> None:
    def value(samples: Sequence[int]) -> float:
        return broken if {5, 11} & set(samples) else 1.0

    found = search(range(16), broken, value, lambda samples: not value(samples) <= 1.0, Usual(1.0, 2.0))
    assert (sorted(found.causes), found.explained) == ([5, 11], True)


def test_a_spike_that_no_sample_makes_is_not_blamed_on_one() -> None:
    """As one that broken weights make, on whatever samples."""
    found = search(range(64), 9.0, lambda _: 9.0, lambda _: True, Usual(1.0, 2.0))
    assert (found.causes, found.explained) == ([], False)
    assert found.tests == 6 + 1
    found = search(range(64), math.inf, lambda _: math.inf, lambda _: True, Usual(1.0, 2.0))
    assert (found.causes, found.explained) == ([], False)


def test_of_many_that_break_the_step_as_many_are_named_as_are_looked_for() -> None:
    broken = set(range(3, 3 + MOST + 1))

    def value(samples: Iterable[int]) -> float:
        return math.inf if broken & {*samples} else 1.0

    found = search(range(64), math.inf, value, lambda samples: value(samples) > 1.0, Usual(1.0, 2.0))
    assert (found.causes, found.explained) == ([*range(3, 3 + MOST)], False)


def test_a_sample_that_carries_nothing_is_not_blamed() -> None:
    """One that halving ends in, because no half carries the spike."""
    found = search(range(64), 9.0, lambda samples: len(samples) / 8, lambda _: False, Usual(1.0, 2.0))
    assert (found.causes, found.explained, found.tests) == ([], False, 6 + 1)


def test_a_batch_that_is_unusual_as_a_whole_ends_the_search() -> None:
    found = search(range(64), 64.0, lambda samples: float(len(samples)), lambda _: True, Usual(1.0, 2.0))
    assert not found.explained
    assert len(found.causes) <= MOST


def test_usual_is_what_single_spikes_do_not_move() -> None:
    quiet = [1.0 + 0.01 * (place % 5) for place in range(40)]
    calm, with_spikes = usual(quiet), usual([*quiet, 50.0, 60.0, math.inf, math.nan])
    assert with_spikes.median == pytest.approx(calm.median, abs=0.011)
    assert with_spikes.limit < 1.3
    assert not calm.has(1.2)
    assert not calm.has(math.nan)
    assert calm.has(1.09)  # a tenth is nothing, however little a run scatters
    with pytest.raises(ValueError, match="too few"):
        usual([1.0, 2.0, 3.0, math.nan])


@pytest.mark.parametrize(("loss", "share", "expected"), [(9.0, 1 / 32, True), (2.1, 1 / 2, False), (2.6, 1 / 2, True)])
def test_samples_carry_a_loss_by_their_share_of_the_labels(loss: float, share: float, expected: bool) -> None:
    """Of a spike above 2.4 where 2.0 is usual: half of what is too much."""
    assert Standing("loss", 2.5, Usual(2.0, 2.4)).carries(Step(1, "", loss, 1.0), share) is expected
