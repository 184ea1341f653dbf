"""Let ranks agree by small collectives."""

from typing import Any

import torch
import torch.distributed as dist

from plumbline.launcher.runtime.system.world import World


class AllRanksError(Exception):
    """Be raised by all ranks in the same place or by none, so that collective calls are allowed while it passes.

    Of any other exception, code that cleans up has to assume that one rank alone raises it: a collective call would
    then wait for ranks that never come.
    """


def any_rank(flag: bool, world: World) -> bool:
    """Return whether the flag is up on any rank, by which all ranks agree on a step. Collective."""
    value = torch.tensor([int(flag)], dtype=torch.int32, device=world.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Sum element-wise over ranks, in place."""
    dist.all_reduce(value)
    return value


def gather_objects(value: Any, world: World) -> list[Any]:
    """Return small Python objects of all ranks, in the order of ranks."""
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, value)
    return gathered
