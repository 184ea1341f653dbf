"""Who works on which matrix, and what an orthogonalised step is.

tests/distributed/test_optimizers.py has the exchange itself, on real ranks.
"""

from __future__ import annotations

import math

import pytest
import torch

from plumbline.launcher.runtime.engine.zero_shards import pieces_by_group, pieces_by_tensor
from plumbline.launcher.runtime.optim.muon import assign_owners, in_rounds, orthogonal_step


def test_owners_hold_a_piece_and_share_the_work() -> None:
    shapes = [(64, 64)] * 12
    shard = torch.empty(64 * 64 * 3)
    by_group = assign_owners(pieces_by_group(shapes, shard, 4))
    assert [matrix.owner for matrix in by_group] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    by_tensor = assign_owners(pieces_by_tensor(shapes, 4))
    assert sorted(matrix.owner for matrix in by_tensor) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("shape", [(48, 48), (96, 24), (24, 96)])
def test_muon_moves_a_matrix_by_two_tenths_of_lr_along_its_polar_factor(shape: tuple[int, int]) -> None:
    """Newton-Schulz ends with singular values of about 0.7 to 1.2 instead of 1; the singular vectors are the SVD's."""
    torch.manual_seed(1)
    update = torch.randn(shape)
    step = orthogonal_step(update)
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    values = torch.diag(left.T @ -step @ right.T) / (0.2 * math.sqrt(max(shape)))
    assert values.min() > 0.65
    assert values.max() < 1.25
    assert values.std() > 0.01, "it is Newton-Schulz, not an SVD"
    rest = left.T @ -step @ right.T - torch.diag(values) * 0.2 * math.sqrt(max(shape))
    assert rest.norm() < 0.02 * step.norm()
    assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2), "the RMS of an AdamW step at lr 1"


def test_rounds_hold_every_matrix_once_and_one_for_each_owner() -> None:
    shapes = [(8, 8), (40, 8), (8, 8), (8, 8), (8, 8)]
    layout = assign_owners(pieces_by_tensor(shapes, 3))
    rounds = in_rounds(layout, 3)
    owners = [[matrix.owner for matrix in matrices] for matrices in rounds]
    assert owners == [[0, 1, 2], [0, 2]]
    assert sorted(id(matrix) for matrices in rounds for matrix in matrices) == sorted(id(matrix) for matrix in layout)
