"""Find the samples that cause a spike by repeated halving (adaptive group testing)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from plumbline.launcher.runtime.run.outliers import usual_range

AROUND = 32
"""Steps before and after a step with which it is compared."""
DEVIATIONS = 6.0
"""Robust standard deviations above the median at which a value is a spike."""
AT_LEAST = 0.1
"""Least excess of a spike over the median, as a share of it, since some runs hardly scatter."""
MOST = 16
"""Most causes to look for: if more are needed, the batch as a whole is unusual."""


@dataclass(frozen=True)
class Usual:
    """Describe the usual range of a number in the surrounding steps."""

    median: float
    limit: float
    """Values above are spikes."""

    def has(self, value: float) -> bool:
        """Return whether a value is not a spike; values that are not finite are spikes."""
        return value <= self.limit


def usual(values: Sequence[float]) -> Usual:
    """Return the usual range of some values: up to six robust standard deviations above their median.

    Raises:
        ValueError: fewer than four are finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 4:
        raise ValueError(
            f"{len(finite)} finite numbers of steps around it are too few to say what is usual: it takes 4"
        )
    return Usual(*usual_range(finite, DEVIATIONS, AT_LEAST * abs(median(finite))))


@dataclass(frozen=True)
class Found:
    """Hold the result of a search."""

    causes: list[int]
    explained: bool
    """Whether the step is usual without them."""
    tests: int
    """Number of measurements."""


def search(
    samples: Sequence[int],
    spike: float,
    value: Callable[[Sequence[int]], float],
    carries: Callable[[Sequence[int]], bool],
    ok: Usual,
) -> Found:
    """Find the samples without which a step is usual.

    Each takes at most ceil(log2(samples)) + 2 measurements, the last of the step without it:

        while the step without those that were found is a spike:
            halve what is left, going on with the half that carries a spike, down to one sample

    Args:
        samples: all samples of the step.
        spike: the value of the step with all of them.
        value: measures the step with only some samples.
        carries: measures whether some samples cause a spike, given their share of the step.
        ok: the usual range.
    """
    rest, causes, tests, before = list(samples), list[int](), 0, spike
    spared = False  # whether some samples do not cause it
    while not ok.has(before) and len(rest) > 1 and len(causes) < MOST:
        part, is_known = rest, False
        while len(part) > 1:
            half = part[: len(part) // 2]
            is_known = carries(half)
            spared |= not is_known
            part = half if is_known else part[len(part) // 2 :]
            tests += 1
        if not is_known:  # it is left because the others do not cause it
            tests += 1
            if not carries(part):
                break
        rest = [sample for sample in rest if sample != part[0]]
        after = value(rest)
        tests += 1
        if math.isfinite(before) and after >= before:  # no change: broken weights spike on any sample
            break
        causes.append(part[0])
        before = after
    if not math.isfinite(before) and not spared:  # every sample tested causes it, as with broken weights
        causes = []
    return Found(causes, ok.has(before), tests)
