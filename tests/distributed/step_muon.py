"""A program for tests to start on several ranks: ShardedMuon on shards, against torch.optim.Muon on whole matrices.

    step_muon.py OUTPUT

Random gradients, the same for both, in the layouts of ZeRO-1 and 2 and of ZeRO-3. Writes, for each layout, the largest
difference of a weight after three steps, the largest change of a weight, and what each rank owned, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plumbline.launcher.runtime.engine.zero_shards import pieces_by_group, pieces_by_tensor
from plumbline.launcher.runtime.optim.muon import ShardedMuon
from plumbline.launcher.runtime.ranks.world import World

SHAPES = [(24, 7), (5, 11), (1, 3), (16, 16), (2, 40), (9, 4)]  # 638 elements: no size divides by the ranks
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8}


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {layout: compare(layout, rank, ranks) for layout in ("by_group", "by_tensor")}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a Python that ends among them


def compare(layout: str, rank: int, ranks: int) -> dict[str, object]:
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    before = [weight.detach().clone() for weight in whole]
    reference = torch.optim.Muon(whole, adjust_lr_fn="match_rms_adamw", **SETTINGS)

    shards = cut(layout, [weight.detach() for weight in whole], ranks)
    shard = nn.Parameter(shards[rank])
    pieces = pieces_by_tensor(SHAPES, ranks) if layout == "by_tensor" else pieces_by_group(SHAPES, shard, ranks)
    muon = ShardedMuon([{"params": [shard], **SETTINGS}])
    muon.attach({shard: list(pieces)}, World(rank, rank, ranks, torch.device("cpu")))
    for _ in range(3):
        for weight in whole:
            weight.grad = torch.randn(weight.shape)
        shard.grad = cut(layout, [weight.grad for weight in whole if weight.grad is not None], ranks)[rank]
        reference.step()
        muon.step()

    expected = cut(layout, [weight.detach() for weight in whole], ranks)[rank]
    difference = (shard.detach() - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    change = max((weight.detach() - old).abs().max().item() for weight, old in zip(whole, before, strict=True))
    matrices = [matrix for matrices in muon.rounds[shard] for matrix in matrices]
    owned = [sum(matrix.owner == other for matrix in matrices) for other in range(ranks)]
    return {"difference": difference.item(), "change": change, "owned": owned}


def cut(layout: str, tensors: list[Tensor], ranks: int) -> list[Tensor]:
    """Cut as DeepSpeed does it: return every rank's flat shard."""
    if layout == "by_tensor":
        padded = [nn.functional.pad(t.flatten(), (0, -t.numel() % ranks)).chunk(ranks) for t in tensors]
        return [torch.cat(parts) for parts in zip(*padded, strict=True)]
    flat = torch.cat([t.flatten() for t in tensors])
    return [part.clone() for part in nn.functional.pad(flat, (0, -flat.numel() % (2 * ranks))).chunk(ranks)]


if __name__ == "__main__":
    main()
