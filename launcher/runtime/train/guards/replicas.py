"""End a run whose ranks no longer keep the same weights, and name the ranks that differ from the others.

In data-parallel training every rank computes with weights of its own, which each updates, or receives, by itself. A bit
that one rank alone has wrong makes it train another model, whose gradients all the others take in; no number of the run
shows it. So checksums of what all ranks keep whole are compared (`Engine.replicas`), by one small all-reduce.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.system.checksum import checksums
from plumbline.launcher.runtime.system.collectives import gather_objects, gather_rows
from plumbline.launcher.runtime.system.nodes import node_name
from plumbline.launcher.runtime.train.guards.guard import Guard, TrainingError, WrongNodeError

REMEDY = (
    "Look at the memory and the devices of these nodes, leave out the one at fault, and start the same command again"
)


class Replicas(Guard):
    """Compare what all ranks keep whole, at an interval and before every checkpoint.

    Args:
        engine: what trains.
        interval: steps from one comparison to the next; None: only before checkpoints.
    """

    name = "replicas"

    def __init__(self, engine: Engine, interval: int | None) -> None:
        self._engine, self._interval = engine, interval
        self._step = 0
        self._equal_at: int | None = None

    def before_step(self, step: int, _micro_batches: int) -> None:
        """Remember which step comes; one that was compared may come again."""
        self._step, self._equal_at = step, None

    def after_update(self) -> None:
        """Compare at the interval; see `before_save`."""
        if self._interval is not None and self._step % self._interval == 0:
            self._compare(self._step)

    def before_save(self, step: int) -> None:
        """Compare what is about to be saved.

        Raises:
            WrongNodeError: on all ranks, some differ from a majority, in all that differs.
            TrainingError: on all ranks, they differ, and no majority says which are right.
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
        found, hosts = (
            differing([*names, "counts of steps and rates"], ranks),
            gather_objects(node_name(), engine.world),
        )
        message = (
            f"step {step}: {describe(found, hosts)}: they train different models; the last checkpoint is from before."
        )
        blamed = {rank for ranks_of_one in found.values() for rank in ranks_of_one}
        if len(blamed) < len(hosts):
            raise WrongNodeError(message, sorted({hosts[rank] for rank in blamed}))
        raise TrainingError(f"{message} {REMEDY}")


def all_equal(values: Tensor) -> bool:
    """Return whether a tensor of integers is the same on all ranks. Collective."""
    bounds = torch.stack((values, ~values))  # ~ turns the order round, so that one maximum is the minimum of values
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return bool((bounds[0] == ~bounds[1]).all())


def differing(names: Sequence[str], ranks: Sequence[Sequence[tuple[int, ...]]]) -> dict[str, list[int]]:
    """Return name -> ranks that are to blame, of what is not the same on all ranks.

    Those are the ranks outside of the majority; all of them where no value is that of more than half.

    Args:
        names: of what is compared.
        ranks: what each rank has of it.
    """
    found = {}
    for name, *values in zip(names, *ranks, strict=True):
        usual, count = Counter(values).most_common(1)[0]
        has_majority = 2 * count > len(values)
        if count < len(values):
            found[name] = [rank for rank, value in enumerate(values) if value != usual or not has_majority]
    return found


def describe(found: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """Say which ranks differ in what: "rank 2 on n1 differs from the others in model.norm.weight"."""
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
    """Return a digest of what Python writes of a value."""
    return torch.tensor(list(hashlib.sha256(repr(value).encode()).digest()), dtype=torch.uint8)
