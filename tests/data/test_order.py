"""The order of samples: a bijection that looks random, and a mixture that keeps its proportions exactly."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.data.order import CYCLE, LARGEST, OrderedSource, TrainOrder, derive_key, permute, subkey

KEYS = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 3000), key=KEYS)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert np.sort(permute(np.arange(size), size, key)).tolist() == list(range(size))


@given(size=st.integers(1, LARGEST), key=KEYS, start=st.integers(0, LARGEST))
def test_permute_stays_inside_and_never_collides(size: int, key: int, start: int) -> None:
    index = np.unique((start + np.arange(200)) % size)
    values = permute(index, size, key)
    assert values.min() >= 0
    assert values.max() < size
    assert len(np.unique(values)) == len(index)


@given(size=st.integers(1, 10**6), key=KEYS, data=st.data())
def test_permute_treats_every_index_alone(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    together = permute(np.array(index).reshape(1, -1), size, key)
    assert together.shape == (1, len(index))
    assert together[0].tolist() == [int(permute(one, size, key)) for one in index]


def test_permute_looks_shuffled() -> None:
    size = 20_000
    places = np.arange(size)
    for key in range(5):
        values = permute(places, size, derive_key(key))
        assert abs(np.corrcoef(places, values)[0, 1]) < 0.03  # 4 standard deviations of a random order
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
        assert (values == places).sum() < 10  # a random order fixes one element on average


def test_every_value_is_as_likely_at_every_place_of_a_small_permutation() -> None:
    size, keys = 6, 3000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), permute(np.arange(size), size, derive_key(key))] += 1
    assert np.abs(counts / keys - 1 / size).max() < 0.035  # 5 standard deviations


def test_one_key_for_each_index_is_as_good_as_one_key_for_all() -> None:
    keys = subkey(3, np.arange(50))
    together = permute(np.full(50, 7), 1000, keys)
    assert together.tolist() == [int(permute(7, 1000, int(key))) for key in keys]
    assert len(np.unique(together)) > 40


@pytest.mark.parametrize(("index", "size"), [(5, 5), (-1, 5), (0, 0), (0, LARGEST + 1)])
def test_permute_refuses_what_is_out_of_range(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="permute: "):
        permute(index, size, 1)


def order_of(windows: list[int], weights: list[float], seed: int = 0) -> TrainOrder:
    return TrainOrder(
        [OrderedSource(f"s{i}", f"f{i}", n, w) for i, (n, w) in enumerate(zip(windows, weights, strict=True))], seed
    )


@given(
    windows=st.lists(st.integers(1, 500), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.1, 100), min_size=5, max_size=5),
    cycles=st.integers(0, 10**9),
)
def test_mixture_counts_are_exact_in_every_cycle(windows: list[int], weights: list[float], cycles: int) -> None:
    weights = weights[: len(windows)]
    order = order_of(windows, weights)
    counts = np.bincount(order.locate(np.arange(CYCLE) + cycles * CYCLE).source, minlength=len(windows))
    exact = np.array(weights) / sum(weights) * CYCLE
    assert counts.sum() == CYCLE
    assert np.abs(counts - exact).max() < 1  # the largest remainder method gives the floor or the ceiling


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.9, 0.05, 0.05], [5.0, 1.0, 1.0, 3.0]])
def test_every_stretch_keeps_the_proportions(weights: list[float]) -> None:
    source = order_of([10] * len(weights), weights).locate(np.arange(CYCLE)).source
    for number, weight in enumerate(weights):
        drawn = np.cumsum(source == number)
        wanted = np.arange(1, CYCLE + 1) * weight / sum(weights)
        assert np.abs(drawn - wanted).max() < len(weights)


def test_every_window_comes_exactly_once_an_epoch() -> None:
    windows = [37, 400]
    order = order_of(windows, [1.0, 3.0])
    located = order.locate(np.arange(3 * CYCLE))
    for number, size in enumerate(windows):
        mine = located.source == number
        epochs = located.epoch[mine]
        assert np.all(np.diff(epochs) >= 0)
        for epoch in range(5):
            assert sorted(located.window[mine][epochs == epoch].tolist()) == list(range(size))


def test_order_changes_with_seed_epoch_and_corpus_only() -> None:
    first = order_of([1000], [1.0]).locate(np.arange(2000)).window
    assert not np.array_equal(first[:1000], first[1000:])
    assert not np.array_equal(first, order_of([1000], [1.0], seed=1).locate(np.arange(2000)).window)
    renamed = TrainOrder([OrderedSource("other name", "f0", 1000, 17.0)], 0)
    assert np.array_equal(first, renamed.locate(np.arange(2000)).window)
    changed = TrainOrder([OrderedSource("s0", "other tokens", 1000, 1.0)], 0)
    assert not np.array_equal(first, changed.locate(np.arange(2000)).window)


def test_order_is_the_one_that_was_published() -> None:
    """A change of the order breaks every run in progress: it must be on purpose."""
    located = order_of([1000, 50], [3.0, 1.0], seed=7).locate([0, 1, 2, 3, 10**12])
    assert located.source.tolist() == [0, 0, 1, 0, 0]
    assert located.epoch.tolist() == [0, 0, 0, 0, 750_000_000]
    assert located.window.tolist() == [37, 232, 10, 613, 686]


def test_any_sample_is_found_at_once() -> None:
    order = order_of([10**12, 10**9], [1.0, 1.0])
    located = order.locate(10**17)
    assert int(located.epoch) == 10**17 // 2 // order.sources[int(located.source)].num_windows
    assert 0 <= int(located.window) < 10**12


@given(samples=st.integers(0, 3 * CYCLE))
def test_samples_per_source_counts_what_locate_gives(samples: int) -> None:
    order = order_of([10, 20, 30], [1.0, 2.0, 0.5])
    drawn = Counter(order.locate(np.arange(samples)).source.tolist())
    assert order.samples_per_source(samples) == {f"s{i}": drawn[i] for i in range(3)}


def test_a_weight_that_rounds_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight 1e-06 of s1 is less than one sample in 10000"):
        order_of([10, 10], [1.0, 1e-6])


def test_the_same_tokens_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="a and b hold the same tokens"):
        TrainOrder([OrderedSource("a", "same", 10, 1.0), OrderedSource("b", "same", 10, 1.0)], 0)
