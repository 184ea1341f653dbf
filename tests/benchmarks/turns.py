"""Time ways to do the same thing in turns, so that drift of the machine strikes all alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Way = Callable[[], object]
"""Do the thing once; what it leaves on a device need not be done yet."""


def take_turns(
    ways: Mapping[str, Way],
    rounds: int,
    device: torch.device,
    typical: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the seconds of each way, from the first round after the one that warms up.

    Args:
        ways: to take turns.
        rounds: of each way.
        device: that they use.
        typical: makes one number of those of the rounds; the mean, where some rounds do more than others.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            synchronize(device)
            start = time.perf_counter()
            way()
            synchronize(device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: typical(taken) for name, taken in seconds.items()}


def compared(seconds: Mapping[str, float], what: str) -> list[dict[str, Any]]:
    """Return a row for each way; `ratio` is its seconds over those of the first."""
    first = next(iter(seconds.values()))
    return [{what: name, "seconds": taken, "ratio": round(taken / first, 3)} for name, taken in seconds.items()]


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
