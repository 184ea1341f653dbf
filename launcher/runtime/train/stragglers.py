"""Name a rank that is slower than the others, which have to wait for it in every step.

In data-parallel training a step takes equally long on every rank: fast ranks wait in collectives for the slow one, so
step times do not show which it is. Local work does: how long a rank waits for its own data, and how long a fixed matrix
product takes on its device without communication, at any ZeRO stage. Neither shows a slow link: `doctor.py` measures
pairs of ranks.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from plumbline.launcher.runtime.cluster.nodes import node_name
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.system.log import LOG

T = TypeVar("T")

STEPS = 100
"""Steps of a window, or a multiple of it if they are too short for the time that the products take."""
SHARE = {"cuda": 0.001, "cpu": 0.005}
"""Device -> share of a window that the products take. A GPU computes hundreds of them in a few milliseconds."""
AT_LEAST, AT_MOST = {"cuda": 0.005, "cpu": 0.02}, 0.1
"""Bounds of that time in seconds: fewer products would be too noisy."""
TOLERANCE = 0.2
"""How much slower than the others a rank must be to be named."""
WINDOWS = 2
"""Windows in a row in which it must be slow: one may be chance."""


@dataclass(frozen=True)
class Own:
    """Hold the time that a rank spent on local work in a window."""

    node: str
    product: float
    """Seconds per matrix product."""
    data: float
    """Share of the window spent waiting for its data."""


class Stragglers:
    """Compare the ranks at the end of each window. All ranks create one together, and call it after the same steps.

    Args:
        world: this process among all; the process group must be up.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._share, self._at_least = SHARE[world.device.type], AT_LEAST[world.device.type]
        on_gpu = world.device.type == "cuda"
        size, self._together = (2048, 10) if on_gpu else (256, 1)
        self._matrix = torch.ones(size, size, device=world.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        self._slow: Counter[tuple[int, str]] = Counter()
        self._begun, self._waited = time.perf_counter(), 0.0

    def wait_for(self, batches: Iterator[T]) -> T:
        """Return this rank's next batch, and measure how long it took to arrive."""
        begun = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - begun
        return batch

    def after_step(self, step: int) -> dict[str, float]:
        """Return the values for metrics.jsonl at the end of a window, else nothing; warn of slow ranks.

        Collective at the end of a window.
        """
        if self._world.size == 1 or step % STEPS:
            return {}
        took = time.perf_counter() - self._begun
        if self._share * min(gather_objects(took, self._world)) < self._at_least:
            return {}
        mine = Own(node_name(), self._time_product(min(self._share * took, AT_MOST)), self._waited / took)
        ranks: list[Own] = gather_objects(mine, self._world)
        self._begun, self._waited = time.perf_counter(), 0.0
        found = {(rank, why): how for rank, why, how in slow_ranks(ranks)}
        self._slow = Counter({case: self._slow[case] + 1 for case in found})
        named = [case for case, windows in self._slow.items() if windows >= WINDOWS]
        for rank, why in named:
            if self._slow[rank, why] == WINDOWS:
                LOG.warning(
                    f"step {step}: rank {rank} on {ranks[rank].node} holds the others up: {found[rank, why]}, twice "
                    "in a row; see that nothing else runs there, or leave the node out"
                )
        record = {"rank_skew": max(ratios([own.product for own in ranks]))}
        return record | ({"slow_rank": float(named[0][0])} if named else {})

    def _time_product(self, seconds: float) -> float:
        """Return how long the product takes, measured for `seconds`, but at least once."""
        self._synchronize()
        begun, products = time.perf_counter(), 0
        while True:
            for _ in range(self._together):
                torch.mm(self._matrix, self._matrix)
            self._synchronize()
            products += self._together
            took = time.perf_counter() - begun
            if took >= seconds:
                return took / products

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return the median of the others for each of two or more values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2, (len(values) - 1) // 2  # places among the sorted others
    medians = [0.0] * len(values)
    for place, index in enumerate(order):
        low, high = (values[order[other + (other >= place)]] for other in middle)
        medians[index] = (low + high) / 2
    return medians


def ratios(values: Sequence[float]) -> list[float]:
    """Return each value divided by the median of the others."""
    return [value / usual for value, usual in zip(values, medians_of_others(values), strict=True)]


def slow_ranks(ranks: Sequence[Own]) -> list[tuple[int, str, str]]:
    """Return (rank, kind, description) for everything that makes a rank slower than the others in a window."""
    found = []
    for rank, ratio in enumerate(ratios([own.product for own in ranks])):
        if ratio > 1 + TOLERANCE:
            found.append((rank, "device", f"its device takes {ratio:.2f} times as long for the same work"))
    shares = [own.data for own in ranks]
    for rank, (share, usual) in enumerate(zip(shares, medians_of_others(shares), strict=True)):
        if share - usual > TOLERANCE:
            text = f"it waits for its data {share:.0%} of the time, the others {usual:.0%}"
            found.append((rank, "data", text))
    return found
