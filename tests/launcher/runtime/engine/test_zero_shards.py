"""Where matrices lie in the flat shards that ZeRO makes of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plumbline.launcher.runtime.engine.zero_shards import locate_matrices, pieces_by_group, pieces_by_tensor
from plumbline.launcher.runtime.optim.muon import ShardedMuon
from plumbline.launcher.runtime.ranks.world import World

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
    for matrix, piece in zip(matrices, pieces, strict=True):
        held = [rank for rank in range(ranks) if piece.lengths[rank]]
        found = [shards[rank][piece.starts[rank] :][: piece.lengths[rank]] for rank in held]
        assert torch.equal(torch.cat(found), matrix.flatten())


def test_a_shard_that_holds_something_else_is_refused() -> None:
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    matrices = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 6))]
    for order, fits in ((matrices, True), (matrices[::-1], False)):
        muon = ShardedMuon([{"params": list(matrices), "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}])
        muon.param_groups[0]["params"] = [torch.cat([m.detach().flatten() for m in order])]
        if fits:
            (located,) = locate_matrices(muon, SimpleNamespace(), 1, world).values()
            assert [piece.shape for piece in located] == [(3, 4), (2, 6)]
        else:
            with pytest.raises(RuntimeError, match="in another way over its shards"):
                locate_matrices(muon, SimpleNamespace(), 1, world)
