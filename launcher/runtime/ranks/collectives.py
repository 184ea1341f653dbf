"""Let ranks agree by small collectives."""

from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plumbline.launcher.runtime.ranks.device_clock import DeviceClock
from plumbline.launcher.runtime.ranks.world import World

Result = TypeVar("Result")

LOOK = 1.0
"""Seconds between collectives of ranks that wait for the main one."""


class AllRanksError(Exception):
    """Signal an error that all ranks raise in the same place, so that handlers may make collective calls.

    For any other exception, cleanup code has to assume that only one rank raised it: a collective call would then wait
    forever for the others.
    """


def any_rank(flag: bool, world: World) -> bool:
    """Return whether the flag is true on any rank, so that all ranks act at the same step. Collective."""
    value = torch.tensor([int(flag)], dtype=torch.int32, device=world.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Sum element-wise over ranks, in place, with no message for an empty tensor or a world of one rank."""
    if value.numel() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


class LateSum:
    """Sum a vector over ranks and copy it to the host asynchronously. Creating it is collective; `read` is not.

    On a GPU both are queued after the work in progress: neither host nor device waits for the other. Gloo sums in its
    own thread.

    Args:
        summed: [n]: values to sum over ranks, in place.
        shared: [m]: values that are already the same on all ranks, copied to the host too.
        clock: returns when a GPU finished.
    """

    def __init__(self, summed: torch.Tensor, shared: torch.Tensor, clock: DeviceClock | None = None) -> None:
        self._parts, self._clock = (summed, shared), clock
        self.done: float | None = None
        """When the GPU had finished, by `time.perf_counter`, set by `read`; None without a GPU or a clock."""
        self._work = dist.all_reduce(summed, async_op=True) if dist.get_world_size() > 1 else None
        self._arrived: torch.cuda.Event | None = None
        if summed.device.type == "cuda":
            if self._work is not None:
                self._work.wait()  # the stream waits, not the host
            both = torch.cat(self._parts)
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._arrived = torch.cuda.Event(enable_timing=self._clock is not None)
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the sums, followed by the shared values; wait until both have arrived."""
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
    """Return small Python objects of all ranks, in rank order, over `group` of all ranks if given. Collective.

    Threads that communicate at the same time need separate groups.
    """
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, value, group)
    return gathered


def gather_rows(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the tensors of all ranks, which have one shape, as [ranks, ...] in rank order. Collective."""
    rows = [torch.empty_like(values) for _ in range(world.size)]
    dist.all_gather(rows, values.contiguous())
    return torch.stack(rows)


def shift(values: torch.Tensor, distance: int, world: World) -> torch.Tensor:
    """Return the tensor, of the same shape, of the rank `distance` before this one. Collective.

    Ranks are cyclic: before rank 0 is the last one.
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
    """Call `action` on rank 0 only, and return its result on all ranks. Collective.

    A world of one rank needs no process group for this.

    Raises:
        ValueError: on all ranks, if `action` raised it.
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
    """Return what `action` returns on this rank; if it raises on one rank, all ranks raise. Collective.

    Raises:
        ValueError: on all ranks, if `action` raised it on the first rank that failed.
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
    """Call `action` on rank 0 while all ranks wait, and return whether it finished. Collective.

    A single collective would time out, so the ranks meet repeatedly.

    Args:
        action: must not raise, and ends with the process if it is no longer waited for.
        world: this process among all.
        is_enough: returns, on any rank, whether to stop waiting.
    """
    worker = Thread(target=action if world.is_main else lambda: None, daemon=True)
    worker.start()
    while any_rank(worker.is_alive(), world):
        if any_rank(is_enough(), world):
            return False
        worker.join(LOOK)
    return True
