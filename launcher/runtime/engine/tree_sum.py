"""Sum over the micro-batches of a step in an order that does not depend on the number of ranks.

A step has V micro-batches, of which rank r of W holds numbers r, r + W, r + 2 W, ... (data/loader.py). Let L be the
largest power of two that divides V. The terms of lane l, numbers l, l + L, l + 2 L, ..., are added one after another.
Then the lanes are halved until one is left: lane l adds lane l + L / 2, then l + L / 4, and so on. For every power of
two W that divides V, the lanes of a rank are added together before any lane of another rank, so each rank sums its own
lanes first, and then the sums of the ranks are added in the same way.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from plumbline.launcher.runtime.ranks.world import World


def lane_count(micro_batches: int) -> int:
    """Return the number of lanes of a step with `micro_batches`, which is also the most ranks it can have."""
    return micro_batches & -micro_batches


def order_of_lanes(micro_batches: int, ranks: int) -> list[list[int]]:
    """Return the order in which a rank adds its micro-batches, with lanes that are added together next to each other.

    Args:
        micro_batches: number in the step, over all ranks.
        ranks: number of ranks, a power of two that divides `micro_batches`.

    Returns:
        For each lane of a rank, the indices of its terms among the rank's micro-batches.
    """
    own, lanes = micro_batches // ranks, lane_count(micro_batches) // ranks
    order = [0]
    while len(order) < lanes:
        order = [lane for first in order for lane in (first, first + len(order))]
    return [list(range(lane, own, lanes)) for lane in order]


class TreeSum:
    """Add up a rank's lanes in the order of `order_of_lanes`, keeping only pending sums.

    For n lanes at most log2(n) + 1 sums are held at a time.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []  # number of lanes, and their sum
        self._lane: Tensor | None = None

    def add(self, term: Tensor) -> None:
        """Add a term to the current lane; the sum may be accumulated in the tensor itself."""
        self._lane = term if self._lane is None else self._lane.add_(term)

    def end_lane(self) -> None:
        """End the current lane, and add up sums of equally many lanes."""
        assert self._lane is not None, "a lane has a term"
        self._sums.append((1, self._lane))
        self._lane = None
        while len(self._sums) > 1 and self._sums[-1][0] == self._sums[-2][0]:
            count, upper = self._sums.pop()
            self._sums[-1] = 2 * count, self._sums[-1][1].add_(upper)

    @property
    def total(self) -> Tensor:
        """Return the sum of all lanes, whose number is a power of two."""
        ((_, total),) = self._sums
        return total


def sum_over_tree(mine: Tensor, world: World) -> Tensor:
    """Return the sum over a power-of-two number of ranks, recursively the lower half plus the upper half. Collective.

    Each rank sums an equal part of the elements and sends it to all, so each sends 2 (W - 1) / W times its data, as in
    an all-reduce.

    Args:
        mine: this rank's term, flat.
        world: this process among all.
    """
    if world.size == 1:
        return mine
    padded = torch.nn.functional.pad(mine, (0, -len(mine) % world.size))
    terms = torch.empty_like(padded)
    dist.all_to_all_single(terms, padded)
    parts = terms.view(world.size, -1)
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    dist.all_gather_into_tensor(padded, parts[0])
    return padded[: len(mine)]
