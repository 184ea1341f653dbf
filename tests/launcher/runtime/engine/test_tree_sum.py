"""Sum micro-batches in an order that knows no ranks: what the lanes are, and that any ranks make the same sum."""

import math

import pytest
import torch
from torch import Tensor

from plumbline.launcher.runtime.engine.tree_sum import TreeSum, lane_count, order_of_lanes


def of_rank(terms: Tensor, rank: int, ranks: int) -> tuple[Tensor, int]:
    """Return what a rank sums of the terms of a step, [V, n], and how many sums it held at most."""
    mine, own, held = TreeSum(), terms[rank::ranks], 0
    for lane in order_of_lanes(len(terms), ranks):
        for index in lane:
            mine.add(own[index].clone())
        mine.end_lane()
        held = max(held, len(mine._sums) + 1)
    return mine.total, held


def over_ranks(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [lower + upper for lower, upper in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 12, 24, 64])
def test_the_sum_knows_no_ranks(micro_batches: int) -> None:
    terms = torch.randn(micro_batches, 1000, generator=torch.Generator().manual_seed(micro_batches))
    fitting = [2**power for power in range(8) if micro_batches % 2**power == 0]
    assert max(fitting) == lane_count(micro_batches)
    sums = [over_ranks([of_rank(terms, rank, ranks)[0] for rank in range(ranks)]) for ranks in fitting]
    for found in sums:
        assert torch.equal(found, sums[0])
    torch.testing.assert_close(sums[0].double(), terms.double().sum(0), rtol=0, atol=1e-4)


def test_few_sums_are_held_at_a_time() -> None:
    for ranks in (1, 2, 16):
        lanes = 64 // ranks
        assert of_rank(torch.ones(64, 1), 0, ranks)[1] <= math.log2(lanes) + 2


@pytest.mark.parametrize(("micro_batches", "ranks"), [(8, 1), (8, 4), (12, 2), (6, 1)])
def test_a_rank_takes_each_of_its_micro_batches_once(micro_batches: int, ranks: int) -> None:
    lanes = order_of_lanes(micro_batches, ranks)
    assert len(lanes) == lane_count(micro_batches) // ranks
    assert sorted(index for lane in lanes for index in lane) == list(range(micro_batches // ranks))
