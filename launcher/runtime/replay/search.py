"""Find which of some samples cause a spike, by halving: adaptive group testing, of which only the results are real."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from plumbline.launcher.runtime.system.outliers import usual_range

AROUND = 32
"""Steps before a step, and behind it, of which it is compared with the usual."""
DEVIATIONS = 6.0
"""Robust standard deviations above the median that are a spike."""
AT_LEAST = 0.1
"""Share of the median that a spike is above it at least: some runs hardly scatter."""
MOST = 16
"""Causes that are looked for: where more are needed, the batch as a whole is unusual."""


@dataclass(frozen=True)
class Usual:
    """Say what a number is in the steps around."""

    median: float
    limit: float
    """What is above is a spike."""

    def has(self, value: float) -> bool:
        """Return whether a value is no spike; what is not finite is one."""
        return value <= self.limit


def usual(values: Sequence[float]) -> Usual:
    """Return what is usual among some values: their median, and above it six robust standard deviations.

    Raises:
        ValueError: there are fewer than four that are finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 4:
        raise ValueError(
            f"{len(finite)} finite numbers of steps around it are too few to say what is usual: it takes 4"
        )
    return Usual(*usual_range(finite, DEVIATIONS, AT_LEAST * abs(median(finite))))


@dataclass(frozen=True)
class Found:
    """Say what came of a search."""

    causes: list[int]
    explained: bool
    """Whether the step without them is usual."""
    tests: int
    """How often something was measured."""


def search(
    samples: Sequence[int],
    spike: float,
    value: Callable[[Sequence[int]], float],
    carries: Callable[[Sequence[int]], bool],
    ok: Usual,
) -> Found:
    """Find the samples without which a step is usual.

    Each takes ceil(log2(samples)) + 2 measurements at most, of which the last one is of the step without it:

        while the step without those that were found is a spike:
            halve what is left, going on with the half that carries a spike, down to one sample

    Args:
        samples: all samples of the step.
        spike: the value of the step on all of them.
        value: measures the step on some samples, without the others.
        carries: measures whether some samples carry a spike, by their share of the step.
        ok: what is usual.
    """
    rest, causes, tests, before = list(samples), list[int](), 0, spike
    spared = False  # whether there are samples that do not carry it
    while not ok.has(before) and len(rest) > 1 and len(causes) < MOST:
        part, is_known = rest, False
        while len(part) > 1:
            half = part[: len(part) // 2]
            is_known = carries(half)
            spared |= not is_known
            part = half if is_known else part[len(part) // 2 :]
            tests += 1
        if not is_known:  # it was reached because the others do not
            tests += 1
            if not carries(part):
                break
        rest = [sample for sample in rest if sample != part[0]]
        after = value(rest)
        tests += 1
        if math.isfinite(before) and after >= before:  # it changes nothing: broken weights make a spike of any sample
            break
        causes.append(part[0])
        before = after
    if not math.isfinite(before) and not spared:  # each sample that was looked at makes it, as by broken weights
        causes = []
    return Found(causes, ok.has(before), tests)
