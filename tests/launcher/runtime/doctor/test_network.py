"""Who is named when sums are wrong, when pairs are slow and when clocks differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from plumbline.launcher.runtime.doctor import clocks, collectives, pairs

if TYPE_CHECKING:
    from plumbline.launcher.runtime.doctor.check import Report
    from tests.launcher.runtime.doctor.conftest import Reports


def levels(found: list[Any]) -> set[tuple[str, str]]:
    return {(finding.level, finding.node) for finding in found}


def test_of_many_ranks_one_is_measured_for_each_node() -> None:
    assert pairs.members_of(["a", "a", "b", "b"]) == [0, 1, 2, 3]
    assert pairs.members_of(["a", "a", "a", "b", "b", "b", "c", "c", "a"]) == [0, 3, 6]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_every_pair_has_its_turn_and_nobody_is_in_two_at_once(count: int) -> None:
    members = [10 * rank for rank in range(count)]
    turns = pairs.turns(members)
    met = [pair for turn in turns for pair in turn]
    assert sorted(met) == [(low, high) for low in members for high in members if low < high]
    for turn in turns:
        assert len({rank for pair in turn for rank in pair}) == 2 * len(turn)


def measured(reports: Reports, count: int, per_node: int = 1, **speeds: float) -> list[Report]:
    """Return reports of 10 GB/s between all ranks, but for those given as p01=3.0."""
    facts = [
        {"members": list(range(count)), "speeds": {
            str(high): speeds.get(f"p{low}{high}", 10.0) for high in range(low + 1, count)
        }}
        for low in range(count)
    ]  # fmt: skip
    return reports(facts, per_node)


def test_a_slow_node_is_named_and_its_pairs_are_not(reports: Reports) -> None:
    assert levels(pairs.judge(measured(reports, 3))) == {("ok", "all")}
    found = pairs.judge(measured(reports, 3, p02=2.0, p12=2.5))
    assert levels(found) == {("warning", "n2")}
    assert found[0].text == "rank 2 exchanges 2.50 GB/s with any other at most, 0.25 of the median"
    assert levels(pairs.judge(measured(reports, 4, p01=0.5, p12=0.5, p13=0.5))) == {("bad", "n1")}


def test_a_slow_pair_between_good_nodes_is_named(reports: Reports) -> None:
    found = pairs.judge(measured(reports, 4, p13=3.0))
    assert [finding.text for finding in found] == ["rank 1 and rank 3 (n3) exchange 3.00 GB/s, 0.30 of the median"]
    assert found[0].level == "warning"


def test_pairs_between_nodes_are_not_compared_with_those_inside_one(reports: Reports) -> None:
    inside = {"p01": 200.0, "p23": 200.0, "p45": 200.0}
    assert levels(pairs.judge(measured(reports, 6, per_node=2, **inside))) == {("ok", "all")}


def test_two_ranks_have_nothing_to_be_compared_with(reports: Reports) -> None:
    assert levels(pairs.judge(measured(reports, 2, p01=0.001))) == {("ok", "all")}


def test_the_table_is_a_square(reports: Reports) -> None:
    title, head, first, second, third = pairs.table(measured(reports, 3, p12=2.5))
    assert title == "GB/s between ranks"
    assert head.split() == ["n0/0", "n1/1", "n2/2"]
    assert [line.split() for line in (first, second, third)] == [
        ["n0/0", "-", "10.00", "10.00"],
        ["n1/1", "10.00", "-", "2.50"],
        ["n2/2", "10.00", "2.50", "-"],
    ]
    assert pairs.table(measured(reports, 1)) == []


def sums(reports: Reports, *wrong: list[int]) -> list[Report]:
    facts = [
        {"wrong": {"all-reduce in bf16": {str(rank): 3 for rank in ranks}} if ranks else {}, "gigabytes_per_second": 1}
        for ranks in wrong
    ]
    return reports(facts)


def test_a_wrong_sum_names_who_contributes_it_or_who_receives_it(reports: Reports) -> None:
    assert levels(collectives.judge(sums(reports, [], [], []))) == {("ok", "all")}
    assert levels(collectives.judge(sums(reports, [1], [1], [1]))) == {("bad", "n1")}
    assert levels(collectives.judge(sums(reports, [], [], [0, 1, 2]))) == {("bad", "n2")}
    assert levels(collectives.judge(sums(reports, [1], [1], [1, 2]))) == {("bad", "n1"), ("bad", "n2")}


def test_the_quickest_exchange_says_how_far_clocks_are_apart() -> None:
    assert clocks.estimate([(100.0, 53.0, 110.0), (200.0, 150.5, 201.0)]) == {"ahead": 50.0, "within": 0.5}


@pytest.mark.parametrize(
    ("ahead", "within", "level"),
    [(1.5, 0.1, "warning"), (-1.5, 0.1, "warning"), (0.9, 0.0, "ok"), (1.5, 0.7, "ok")],
)
def test_a_clock_that_is_certainly_off_is_named(reports: Reports, ahead: float, within: float, level: str) -> None:
    found = clocks.judge(reports([{"ahead": 0.0, "within": 0.0}, {"ahead": ahead, "within": within}]))
    assert levels(found) == {(level, "n1" if level == "warning" else "all")}
