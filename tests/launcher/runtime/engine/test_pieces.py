"""What a sample of a piece is made of."""

from __future__ import annotations

import pytest
import torch

from plumbline.launcher.runtime.engine.pieces import SAMPLED, sampled


def test_small_pieces_are_sampled_whole() -> None:
    for count in (0, 1, SAMPLED):
        assert sampled(torch.empty(count)).numel() == count


def test_a_sample_is_spread_over_all_rows_and_columns_and_not_copied() -> None:
    matrix = torch.zeros(4096, 4096)
    sample = sampled(matrix.view(-1))
    assert SAMPLED / 2 < sample.numel() <= SAMPLED
    sample.fill_(1.0)
    assert matrix.sum(0).min() > 0
    assert matrix.sum(1).min() > 0


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_its_mean_square_is_that_of_all(scale: float) -> None:
    values = scale * torch.randn(5 * SAMPLED, generator=torch.Generator().manual_seed(0))
    assert sampled(values).square().mean().item() == pytest.approx(values.square().mean().item(), rel=5e-3)
