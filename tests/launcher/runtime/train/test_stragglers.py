"""A rank that is slower than the others is named; equal ones are not, nor one that was slow for a moment."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.train import stragglers
from plumbline.launcher.runtime.train.stragglers import STEPS, Own, Stragglers, medians_of_others, ratios, slow_ranks


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
    assert "waits for its data 50% of the time, the others 2%" in text


def test_a_ratio_leaves_its_own_value_out() -> None:
    assert ratios([1.0, 2.0]) == [0.5, 2.0]
    assert ratios([1.0, 1.0, 4.0]) == [0.4, 0.4, 4.0]


@given(values=st.lists(st.floats(0.1, 9.0), min_size=2, max_size=9))
def test_the_medians_of_others_are_what_sorting_each_time_gives(values: list[float]) -> None:
    others = [[*values[:place], *values[place + 1 :]] for place in range(len(values))]
    assert medians_of_others(values) == [median(each) for each in others]


def test_a_rank_is_named_once_it_was_slow_in_two_windows_in_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ranks would tell each other is given; the rest is what runs in training."""
    monkeypatch.setitem(stragglers.AT_LEAST, "cpu", 0.0)
    watch = Stragglers(World(0, 0, 2, torch.device("cpu")))
    told: list[tuple[int, bool]] = []
    for window, factor in enumerate([1.5, 1.0, 1.5, 1.5, 1.5, 1.0, 1.5, 1.5], start=1):
        told_by_ranks = iter([[10.0, 10.0], ranks([1.0, factor])])
        monkeypatch.setattr(stragglers, "gather_objects", lambda _mine, _world, told=told_by_ranks: next(told))
        assert watch.after_step(window * STEPS - 1) == {}
        record = watch.after_step(window * STEPS)
        assert record["rank_skew"] == factor
        told.append((int(record.get("slow_rank", -1)), "rank 1 on n1 holds the others up" in capsys.readouterr().err))
    quiet = (-1, False)
    assert told == [quiet, quiet, quiet, (1, True), (1, False), quiet, quiet, (1, True)]


def test_one_rank_waits_for_nobody() -> None:
    assert Stragglers(World(0, 0, 1, torch.device("cpu"))).after_step(STEPS) == {}
