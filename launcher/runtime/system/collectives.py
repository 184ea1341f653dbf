"""Let ranks agree by small collectives."""

from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plumbline.launcher.runtime.system.device_clock import DeviceClock
from plumbline.launcher.runtime.system.world import World

Result = TypeVar("Result")

LOOK = 1.0
"""Seconds between meetings of ranks that wait for the main one."""


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
    """Sum element-wise over ranks, in place. A tensor without elements, and a world of one rank, cost no message."""
    if value.numel() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


class LateSum:
    """Sum a vector over ranks and bring it to the host, while this rank goes on. Collective; `read` is not.

    On a GPU both happen behind what is under way there: neither host nor device waits for the other. Gloo adds up in a
    thread of its own.

    Args:
        summed: [n]: what each rank has of its own; it is written to.
        shared: [m]: what is the same on all ranks already, and goes to the host along with it.
        clock: tells when a GPU had it all.
    """

    def __init__(self, summed: torch.Tensor, shared: torch.Tensor, clock: DeviceClock | None = None) -> None:
        self._parts, self._clock = (summed, shared), clock
        self.done: float | None = None
        """When a GPU had it all, by `time.perf_counter`, once it was read; None without a GPU or a clock."""
        self._work = dist.all_reduce(summed, async_op=True) if dist.get_world_size() > 1 else None
        self._arrived: torch.cuda.Event | None = None
        if summed.device.type == "cuda":
            if self._work is not None:
                self._work.wait()  # the stream does, not the host
            both = torch.cat(self._parts)
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._arrived = torch.cuda.Event(enable_timing=self._clock is not None)
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the sums, then what was shared; wait until both are there."""
        if self._arrived is not None:
            if self._clock is None:
                self._arrived.synchronize()
            else:
                self.done = self._clock.wait(self._arrived)
            return self._host.tolist()
        if self._work is not None:
            self._work.wait()
        return torch.cat(self._parts).tolist()


def gather_objects(value: Any, world: World, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return small Python objects of all ranks, in the order of ranks; over another group of them all if one is given.

    Threads that exchange something at the same time need groups of their own.
    """
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, value, group)
    return gathered


def gather_rows(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return what all ranks hold in a tensor of one shape, [ranks, ...], in the order of ranks. Collective."""
    rows = [torch.empty_like(values) for _ in range(world.size)]
    dist.all_gather(rows, values.contiguous())
    return torch.stack(rows)


def shift(values: torch.Tensor, distance: int, world: World) -> torch.Tensor:
    """Return what the rank holds that stands `distance` before this one, in a tensor of the same shape. Collective.

    Before rank 0 stands the last one; at a distance of all ranks it is this one.
    """
    if distance % world.size == 0:
        return values
    values = values.contiguous()
    came = torch.empty_like(values)
    sent = dist.P2POp(dist.isend, values, (world.rank + distance) % world.size)
    expected = dist.P2POp(dist.irecv, came, (world.rank - distance) % world.size)
    for work in dist.batch_isend_irecv([sent, expected]):
        work.wait()
    return came


def from_main(action: Callable[[], Result], world: World) -> Result:
    """Return on all ranks what `action` returns on rank 0, where alone it is called. Collective.

    A world of one rank needs no process group for it.

    Raises:
        ValueError: on all ranks, what `action` raised.
        OSError: likewise.
    """
    if world.size == 1:
        return action()
    mine: tuple[Any, Exception | None] = None, None
    if world.is_main:
        try:
            mine = action(), None
        except (ValueError, OSError) as error:
            mine = None, error
    result, problem = gather_objects(mine, world)[0]
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


def on_every_rank(action: Callable[[], Result], world: World) -> Result:
    """Return what `action` returns on this rank; what it raises on one is raised on all. Collective.

    Raises:
        ValueError: on all ranks, what `action` raised on the first that failed.
        OSError: likewise.
    """
    result, problem = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = error
    for each in filter(None, gather_objects(problem, world)):
        raise each
    return result  # type: ignore[return-value]


def main_works(action: Callable[[], object], world: World, is_enough: Callable[[], bool]) -> bool:
    """Call `action` on rank 0 while all ranks wait, and return whether it came to its end. Collective.

    A single collective has a time-out, so they meet again and again.

    Args:
        action: raises nothing, and ends with the process if nobody waits any longer.
        world: this process among all.
        is_enough: says, on any rank, to wait no longer.
    """
    worker = Thread(target=action if world.is_main else lambda: None, daemon=True)
    worker.start()
    while any_rank(worker.is_alive(), world):
        if any_rank(is_enough(), world):
            return False
        worker.join(LOOK)
    return True
