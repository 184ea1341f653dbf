"""What a sample of a piece is made of."""

from __future__ import annotations

import pytest
import torch

from plumbline.launcher.runtime.engine.pieces import SAMPLED, sampled, stands_for


def test_small_pieces_are_sampled_whole() -> None:
    for elements in (0, 1, SAMPLED):
        piece = torch.empty(elements)
        assert sampled(piece, 64).numel() == elements
        assert stands_for(piece, piece) == (elements > 0)


@pytest.mark.parametrize(("rows", "width"), [(4096, 4096), (3072, 768), (4096, 11008), (1025, 1024), (5000, 945)])
def test_a_sample_is_spread_over_all_rows_and_columns_and_not_copied(rows: int, width: int) -> None:
    matrix = torch.zeros(rows, width)
    flat = matrix.view(-1)
    sample = sampled(flat, width)
    assert SAMPLED / 4 < sample.numel() <= SAMPLED
    assert stands_for(sample, flat) == pytest.approx(flat.numel() / sample.numel())
    sample.fill_(1.0)
    assert matrix.sum(0).min() > 0
    assert matrix.sum(1).min() > 0


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_its_mean_square_is_that_of_all(scale: float) -> None:
    values = scale * torch.randn(5 * SAMPLED, generator=torch.Generator().manual_seed(0))
    assert sampled(values, 1024).square().mean().item() == pytest.approx(values.square().mean().item(), rel=5e-3)
