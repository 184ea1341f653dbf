"""Which ranks are to blame, by what each of them has got; tests/distributed has the ranks."""

import pytest

from plumbline.launcher.runtime.train.guards.replay import wrong_ranks
from plumbline.launcher.runtime.train.guards.replicas import describe, differing


def sums(*values: int) -> list[list[tuple[int, ...]]]:
    """Return what ranks have of one tensor."""
    return [[(value, 0)] for value in values]


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        (sums(1, 1, 1), None),
        (sums(1, 2, 1), [1]),
        (sums(2, 1, 1, 3, 1), [0, 3]),
        (sums(1, 2), [0, 1]),
        (sums(1, 1, 2, 2), [0, 1, 2, 3]),
        (sums(1, 1, 2, 3), [0, 1, 2, 3]),
    ],
    ids=["equal", "one of three", "two of five", "two ranks", "halves", "half is no majority"],
)
def test_ranks_outside_of_a_majority_are_to_blame(ranks: list[list[tuple[int, ...]]], blamed: list[int] | None) -> None:
    assert differing(["norm"], ranks) == ({} if blamed is None else {"norm": blamed})


def test_ranks_that_differ_are_named_with_their_hosts() -> None:
    hosts = ["n1", "n1", "n2"]
    assert describe({"norm": [2], "head": [2]}, hosts) == "rank 2 on n2 differs from the others in norm and 1 more"
    assert describe({"norm": [0, 2]}, hosts) == "rank 0 on n1, rank 2 on n2 differ from the others in norm"
    assert describe({"norm": [0, 1]}, hosts[1:]) == (
        "rank 0 on n1, rank 1 on n2 differ in norm, and no majority says which is right"
    )


@pytest.mark.parametrize(
    ("results", "wrong"),
    [
        ([[1, 3, 2], [2, 1, 3], [3, 2, 1]], {}),
        ([[1, 3, 2], [9, 1, 3], [3, 2, 1]], {1: [1]}),
        ([[1, 3, 2], [2, 9, 3], [3, 2, 1]], {0: [1]}),
        ([[1, 3, 2], [9, 9, 9], [3, 2, 1]], {0: [1], 1: [1]}),
        ([[1, 3, 2], [8, 1, 3], [3, 9, 1]], {1: [0, 1, 2]}),
        ([[1, 2, 1], [2, 1, 2]], {}),
        ([[9, 2, 1], [2, 1, 2]], {0: [0]}),
        ([[9, 2, 9], [2, 1, 2]], {0: [0, 1]}),
        ([[1, 2, 1], [2, 9, 2]], {0: [0, 1]}),
        ([[9, 1, 1]], {0: [0]}),
        ([[1, 1, 1]], {}),
    ],
    ids=[
        "clean", "an owner", "a replay", "all of one rank", "no two agree", "two clean", "an owner of two, once",
        "an owner of two, twice", "a replay of two", "alone, once", "alone, clean",
    ],
)  # fmt: skip
def test_right_is_what_two_ranks_have_got(results: list[list[int]], wrong: dict[int, list[int]]) -> None:
    """Rank r has results for the micro-batches of ranks r, r - 1 and r - 2; micro-batch k comes to k + 1."""
    assert wrong_ranks(results) == wrong
