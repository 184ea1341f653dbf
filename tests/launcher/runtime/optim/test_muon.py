"""Where matrices lie in flat shards, who works on which, and what an orthogonalised step is.

tests/distributed/test_optimizers.py has the exchange itself, on real ranks.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plumbline.launcher.runtime.optim.muon import (
    ShardedMuon,
    assign_owners,
    in_rounds,
    orthogonal_step,
    pieces_by_group,
    pieces_by_tensor,
)
from plumbline.launcher.runtime.system.world import World

SHAPES = [(24, 7), (5, 11), (1, 3), (16, 16)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_pieces_in_the_order_of_ranks_are_the_matrices(ranks: int, by_tensor: bool) -> None:
    matrices = [torch.randn(shape) for shape in SHAPES]
    if by_tensor:
        parts = [nn.functional.pad(m.flatten(), (0, -m.numel() % ranks)).chunk(ranks) for m in matrices]
        shards = [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]
        pieces = list(pieces_by_tensor(SHAPES, ranks))
    else:
        flat = torch.cat([m.flatten() for m in matrices])
        shards = list(nn.functional.pad(flat, (0, -flat.numel() % (2 * ranks))).chunk(ranks))
        pieces = list(pieces_by_group(SHAPES, shards[0], ranks))
    for matrix, (starts, lengths) in zip(matrices, pieces, strict=True):
        found = [shards[rank][starts[rank] :][: lengths[rank]] for rank in range(ranks) if lengths[rank]]
        assert torch.equal(torch.cat(found), matrix.flatten())


def test_owners_hold_a_piece_and_share_the_work() -> None:
    shapes = [(64, 64)] * 12
    shard = torch.empty(64 * 64 * 3)
    by_group = assign_owners(shapes, pieces_by_group(shapes, shard, 4))
    assert [matrix.owner for matrix in by_group] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    by_tensor = assign_owners(shapes, pieces_by_tensor(shapes, 4))
    assert sorted(matrix.owner for matrix in by_tensor) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_shard_that_holds_something_else_is_refused() -> None:
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    matrices = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 6))]
    for order, fits in ((matrices, True), (matrices[::-1], False)):
        muon = ShardedMuon([{"params": list(matrices), "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}])
        muon.param_groups[0]["params"] = [torch.cat([m.detach().flatten() for m in order])]
        if fits:
            muon.attach(SimpleNamespace(), 1, world)
        else:
            with pytest.raises(RuntimeError, match="in another way over its shards"):
                muon.attach(SimpleNamespace(), 1, world)


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
    layout = assign_owners(shapes, pieces_by_tensor(shapes, 3))
    rounds = in_rounds(layout, 3)
    owners = [[matrix.owner for matrix in matrices] for matrices in rounds]
    assert owners == [[0, 1, 2], [0, 2]]
    assert sorted(id(matrix) for matrices in rounds for matrix in matrices) == sorted(id(matrix) for matrix in layout)
