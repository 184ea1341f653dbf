"""The average stands in the place of the weights for a while; both come back wherever all ranks can bring them back."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from plumbline.launcher.runtime.optim.moving_average import MovingAverage
from plumbline.launcher.runtime.ranks.collectives import AllRanksError


@pytest.mark.parametrize("error", [None, AllRanksError, RuntimeError])
def test_the_weights_come_back_unless_one_rank_may_have_failed_alone(error: type[Exception] | None) -> None:
    weights = torch.arange(3.0)
    seen: list[list[float]] = []  # what the engine computes with, each time that all ranks refresh it
    average = MovingAverage([weights], lambda: seen.append(weights.tolist()), half_life=10)
    weights += 3.0

    with suppress(AllRanksError, RuntimeError), average.in_place():
        assert weights.tolist() == [0.0, 1.0, 2.0]
        if error is not None:
            raise error
    if error is RuntimeError:
        assert seen == [[0.0, 1.0, 2.0]], "a collective call would hang: the other ranks go on"
        return
    assert seen == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with average.in_place():
        assert weights.tolist() == [0.0, 1.0, 2.0]
