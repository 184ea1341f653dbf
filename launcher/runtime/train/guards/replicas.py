"""End a run whose ranks no longer keep the same weights, and name the ranks that differ from the others.

In data-parallel training every rank has its own copy of the weights, which it updates or receives by itself. With one
wrong bit, a rank trains another model, whose gradients all others use; no metric of the run shows it. So checksums of
what all ranks keep whole (`Engine.replicas`) are compared by one small all-reduce.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plumbline.launcher.runtime.cluster.nodes import node_name
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.ranks.checksum import checksums
from plumbline.launcher.runtime.ranks.collectives import gather_objects, gather_rows
from plumbline.launcher.runtime.train.guards.guard import Guard, TrainingError, WrongNodeError

REMEDY = (
    "Look at the memory and the devices of these nodes, leave out the one at fault, and start the same command again"
)


class Replicas(Guard):
    """Compare what all ranks keep whole, at an interval and before every checkpoint.

    Args:
        engine: the engine that trains.
        interval: steps between comparisons; None compares only before checkpoints.
    """

    name = "replicas"

    def __init__(self, engine: Engine, interval: int | None) -> None:
        self._engine, self._interval = engine, interval
        self._step = 0
        self._equal_at: int | None = None

    def before_step(self, step: int, _micro_batches: int) -> None:
        """Remember the next step; after a rollback it may be one that was compared before."""
        self._step, self._equal_at = step, None

    def after_update(self) -> None:
        """Compare if the interval is reached; see `before_save`."""
        if self._interval is not None and self._step % self._interval == 0:
            self._compare(self._step)

    def before_save(self, step: int) -> None:
        """Compare what is about to be saved.

        Raises:
            WrongNodeError: on all ranks, if a majority agrees on each value that differs.
            TrainingError: on all ranks, if they differ and no majority shows which are right.
        """
        if self._equal_at != step:
            self._compare(step)

    def _compare(self, step: int) -> None:
        engine = self._engine
        names, tensors = zip(*engine.replicas(), strict=True)
        counts = _as_tensor([step, *engine.counts()])
        sums = checksums((*tensors, counts), engine.world.device)
        if all_equal(sums):
            self._equal_at = step
            return
        ranks: list[list[tuple[int, ...]]] = [
            [tuple(pair) for pair in rank] for rank in gather_rows(sums, engine.world).tolist()
        ]
        found = differing([*names, "counts of steps and rates"], ranks)
        hosts = gather_objects(node_name(), engine.world)
        message = (
            f"step {step}: {describe(found, hosts)}: they train different models; the last checkpoint is from before."
        )
        blamed = {rank for ranks_of_one in found.values() for rank in ranks_of_one}
        if len(blamed) < len(hosts):
            raise WrongNodeError(message, sorted({hosts[rank] for rank in blamed}))
        raise TrainingError(f"{message} {REMEDY}")


def all_equal(values: Tensor) -> bool:
    """Return whether a tensor of integers is the same on all ranks. Collective."""
    bounds = torch.stack((values, ~values))  # ~ reverses the order, so that its maximum is the minimum of values
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return bool((bounds[0] == ~bounds[1]).all())


def differing(names: Sequence[str], ranks: Sequence[Sequence[tuple[int, ...]]]) -> dict[str, list[int]]:
    """Return name -> ranks with a wrong value, for each name whose value differs between ranks.

    Those are the ranks outside the majority, or all ranks if no value is held by more than half.

    Args:
        names: of the values that are compared.
        ranks: each rank's values.
    """
    found = {}
    for name, *values in zip(names, *ranks, strict=True):
        usual, count = Counter(values).most_common(1)[0]
        has_majority = 2 * count > len(values)
        if count < len(values):
            found[name] = [rank for rank, value in enumerate(values) if value != usual or not has_majority]
    return found


def describe(found: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """Return which ranks differ in what: "rank 2 on n1 differs from the others in model.norm.weight"."""
    blamed = sorted({rank for ranks in found.values() for rank in ranks})
    first, more = next(iter(found)), len(found) - 1
    what = first if not more else f"{first} and {more} more"
    if len(blamed) == len(hosts):
        return f"{name_ranks(blamed, hosts)} differ in {what}, and no majority says which is right"
    return f"{name_ranks(blamed, hosts)} {'differ' if len(blamed) > 1 else 'differs'} from the others in {what}"


def name_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Return "rank 0 on n1, rank 5 on n2"."""
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


def _as_tensor(value: object) -> Tensor:
    """Return a digest of a value's `repr`."""
    return torch.tensor(list(hashlib.sha256(repr(value).encode()).digest()), dtype=torch.uint8)
