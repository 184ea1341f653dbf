"""The order backwards: the inverse of the shuffle, and the samples that read a window."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.data.inverse import samples_of, unpermute
from plumbline.data.order import LARGEST, OrderedSource, TrainOrder, permute, subkey

KEYS = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, LARGEST), key=KEYS, start=st.integers(0, LARGEST))
def test_unpermute_is_the_inverse(size: int, key: int, start: int) -> None:
    index = (start + np.arange(200)) % size
    assert unpermute(permute(index, size, key), size, key).tolist() == index.tolist()
    assert permute(unpermute(index, size, key), size, key).tolist() == index.tolist()


@given(size=st.integers(1, 40), key=KEYS)
def test_unpermute_is_the_inverse_on_all_of_a_small_size(size: int, key: int) -> None:
    everything = np.arange(size)
    assert unpermute(permute(everything, size, key), size, key).tolist() == everything.tolist()


def test_one_key_for_each_place_is_as_good_as_one_key_for_all() -> None:
    keys = subkey(3, np.arange(50))
    assert unpermute(permute(np.full(50, 7), 1000, keys), 1000, keys).tolist() == [7] * 50


def order_of(windows: list[int], weights: list[float], seed: int) -> TrainOrder:
    return TrainOrder(
        [OrderedSource(f"s{i}", f"f{i}", n, w) for i, (n, w) in enumerate(zip(windows, weights, strict=True))], seed
    )


@settings(max_examples=30)
@given(
    windows=st.lists(st.integers(20, 300), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.5, 10), min_size=4, max_size=4),
    seed=st.integers(0, 9),
    stop=st.integers(0, 25_000),
)
def test_samples_of_a_window_are_those_that_locate_finds(
    windows: list[int], weights: list[float], seed: int, stop: int
) -> None:
    order = order_of(windows, weights[: len(windows)], seed)
    located = order.locate(np.arange(stop))
    for source, size in enumerate(windows):
        window = size // 2
        expected = np.flatnonzero((located.source == source) & (located.window == window))
        assert list(samples_of(order, seed, source, window, stop)) == expected.tolist()


def test_samples_of_a_window_are_found_far_out_without_the_way_there() -> None:
    order = order_of([10**12, 50], [3.0, 1.0], seed=5)
    found = list(samples_of(order, 5, 0, 10**11, 4 * 10**12))
    assert len(found) == 3, "three of every four samples are of this source: three epochs"
    located = order.locate(found)
    assert (located.source.tolist(), located.window.tolist()) == ([0] * 3, [10**11] * 3)
    assert located.epoch.tolist() == [0, 1, 2]
