"""A rank that is slower than the others is named; equal ones are not, nor one that was slow for a moment."""

from __future__ import annotations

import pytest

from plumbline.launcher.runtime.train.stragglers import Own, ratios, slow_ranks


def ranks(products: list[float], data: list[float] | None = None) -> list[Own]:
    shares = data or [0.0] * len(products)
    return [Own(f"n{rank}", product, share) for rank, (product, share) in enumerate(zip(products, shares, strict=True))]


@pytest.mark.parametrize(
    ("products", "named"),
    [
        ([1.0, 1.0], []),
        ([1.0, 1.19, 1.0, 1.1], []),
        ([1.0, 1.3], [1]),
        ([1.0, 1.0, 1.0, 3.0], [3]),
        ([2.0, 1.0, 1.0, 2.0, 1.0], [0, 3]),
        ([0.5, 1.0, 1.0, 1.0], []),
    ],
    ids=["equal", "within 20 %", "of two", "one", "two", "a quick one"],
)
def test_a_rank_is_compared_with_the_median_of_the_others(products: list[float], named: list[int]) -> None:
    assert [rank for rank, kind, _ in slow_ranks(ranks(products))] == named
    assert all(kind == "device" for _, kind, _ in slow_ranks(ranks(products)))


def test_a_rank_that_waits_for_its_data_is_named_unless_all_do() -> None:
    assert slow_ranks(ranks([1.0] * 3, [0.3, 0.35, 0.4])) == []
    ((rank, kind, text),) = slow_ranks(ranks([1.0] * 3, [0.05, 0.5, 0.0]))
    assert (rank, kind) == (1, "data")
    assert "waited for its data 50% of the time, the others 2%" in text


def test_a_ratio_leaves_its_own_value_out() -> None:
    assert ratios([1.0, 2.0]) == [0.5, 2.0]
    assert ratios([1.0, 1.0, 4.0]) == [0.4, 0.4, 4.0]
