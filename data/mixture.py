"""Compute which source each sample of a mixture comes from, as weights change and sources end, by arithmetic alone.

The samples fall into segments of constant weights: a new one begins where a weight changes or a source reaches its
limit of epochs. A segment repeats one cycle of slots. How many samples each source gave before a segment is computed
when the mixture is laid out, so sample 10^12 costs the same as sample 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plumbline.data.indexed import Int64s

CYCLE = 10_000
"""Samples after which the mixture repeats: weights are kept to a hundredth of a percent, exactly, in every cycle."""

RAMP_STEPS = 64
"""Number of equal steps in which a weight changes linearly."""

ENDLESS = 2**62
"""A sample number that no run reaches."""


@dataclass(frozen=True)
class OrderedSource:
    """State what the order needs to know about one corpus."""

    name: str
    fingerprint: str
    num_windows: int
    """Samples in one epoch."""
    weight: float
    changes: tuple[tuple[int, float], ...] = ()
    """(sample, weight): the first sample of each later weight, ascending."""
    limit: int | None = None
    """Samples after which its weight goes to the others, in proportion to theirs, or None for no limit."""

    def weight_at(self, sample: int) -> float:
        """Return the weight of the source at sample number `sample`."""
        passed = bisect_right(self.changes, sample, key=lambda change: change[0])
        return self.changes[passed - 1][1] if passed else self.weight


@dataclass(frozen=True)
class Segment:
    """Hold a range of samples that are drawn with the same weights."""

    first_sample: int
    per_cycle: tuple[int, ...]
    """Samples of each source in one cycle."""
    drawn: Int64s
    """Samples of each source before the segment."""


@dataclass(frozen=True)
class Cycle:
    """Hold the order of sources within one cycle."""

    source: Int64s
    """[CYCLE]: the source of each slot."""
    rank: Int64s
    """[CYCLE]: the number of earlier slots of the same source."""
    slots: Int64s
    """[CYCLE]: the slots of the first source, then those of the second, and so on."""
    begins: Int64s
    """[sources]: where the slots of each source begin in `slots`."""


class Mixture:
    """Draw samples from weighted sources.

    Attributes:
        segments: the stretches of constant weights, in order.
        end: number of samples; `ENDLESS` unless every source has a limit or a last weight of 0.
    """

    def __init__(self, sources: Sequence[OrderedSource]) -> None:
        """Lay out all segments.

        Raises:
            ValueError: a weight too small for one sample per cycle, or no source to begin with.
        """
        self.sources = tuple(sources)
        self.segments: list[Segment] = []
        limits = np.array([_limit_of(source) for source in sources], np.int64)
        changes = sorted({sample for source in sources for sample, _ in source.changes})
        drawn, start = np.zeros(len(sources), np.int64), 0
        while start < ENDLESS:
            weights = np.array([source.weight_at(start) for source in sources]) * (drawn < limits)
            if not weights.any():
                break
            segment = Segment(start, tuple(_apportion(weights, CYCLE).tolist()), drawn)
            self.segments.append(segment)
            following = bisect_right(changes, start)
            change = changes[following] if following < len(changes) else ENDLESS
            start = min(change, _first_exhaustion(segment, limits))
            if start < ENDLESS:
                drawn = drawn + _drawn_within(segment, start - segment.first_sample)
        self.end = start
        self._firsts = np.array([segment.first_sample for segment in self.segments], np.int64)
        self._check()

    def _check(self) -> None:
        if not self.segments:
            raise ValueError("data.train: every weight is 0 at the start; give a source a weight above 0")
        begins = {
            source.name: 0 if source.weight else next((first for first, weight in source.changes if weight), 0)
            for source in self.sources
        }
        if late := [name for name, first in begins.items() if first > self.end]:
            raise ValueError(
                f"data.train: no source is left after {self.end:,} samples, before {late[0]} begins: let it begin "
                "earlier, or raise max_epochs of another"
            )
        most = np.max([segment.per_cycle for segment in self.segments], axis=0)
        for source, count in zip(self.sources, most, strict=True):
            if count == 0:
                highest = max(source.weight, *(weight for _, weight in source.changes), 0.0)
                raise ValueError(
                    f"data.train: weight {highest:g} of {source.name} is less than one sample in {CYCLE}; "
                    "raise it or leave the corpus out"
                )

    def draw(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Return the source of each sample, and how many of the same source come before it, in arrays of its shape.

        Raises:
            ValueError: a sample lies beyond the end of the mixture.
        """
        samples = np.asarray(samples, np.int64)
        if samples.size and samples.max() >= self.end:
            raise ValueError(f"data.train: sample {samples.max()}, but the sources end after {self.end} samples")
        number = np.searchsorted(self._firsts, samples, side="right") - 1
        source, ordinal = np.empty_like(samples), np.empty_like(samples)
        for each in np.unique(number):
            segment, chosen = self.segments[each], number == each
            cycle = _cycle(segment.per_cycle)
            turn, slot = np.divmod(samples[chosen] - segment.first_sample, CYCLE)
            source[chosen] = its = cycle.source[slot]
            ordinal[chosen] = segment.drawn[its] + turn * np.array(segment.per_cycle)[its] + cycle.rank[slot]
        return source, ordinal

    def samples_of(self, source: int, ordinals: npt.ArrayLike) -> Int64s:
        """Return the samples of a source, given how many of its samples come before each: the inverse of `draw`.

        Ordinals that the source never reaches give `ENDLESS`.
        """
        ordinals = np.asarray(ordinals, np.int64)
        drawn = np.array([segment.drawn[source] for segment in self.segments], np.int64)
        number = np.searchsorted(drawn, ordinals, side="right") - 1  # the last segment that begins with fewer
        samples = np.full_like(ordinals, ENDLESS)
        for each in np.unique(number):
            segment, chosen = self.segments[each], number == each
            count = segment.per_cycle[source]
            if not count:  # nothing more is drawn: otherwise a later segment would begin with as many
                continue
            cycle = _cycle(segment.per_cycle)
            turn, rank = np.divmod(ordinals[chosen] - segment.drawn[source], count)
            found = segment.first_sample + turn * CYCLE + cycle.slots[cycle.begins[source] + rank]
            samples[chosen] = np.where(found < self.end, found, ENDLESS)
        return samples

    def drawn_before(self, sample: int) -> Int64s:
        """Return how many of the first `sample` samples come from each source; a mixture that ends adds no more."""
        sample = min(sample, self.end)
        segment = self.segments[bisect_right(self.segments, sample, key=lambda each: each.first_sample) - 1]
        return segment.drawn + _drawn_within(segment, sample - segment.first_sample)

    def history(self, samples: int) -> list[tuple[int, list[tuple[str, int, int]]]]:
        """Return everything that the first `samples` samples depend on, except the seed.

        Two mixtures with the same history draw the same samples, whatever comes later.
        """
        return [
            (
                segment.first_sample,
                [
                    (source.fingerprint, source.num_windows, count)
                    for source, count in zip(self.sources, segment.per_cycle, strict=True)
                    if count
                ],
            )
            for segment in self.segments
            if segment.first_sample < samples
        ]


def step_changes(weight: float, changes: Sequence[tuple[int, int, float]]) -> tuple[tuple[int, float], ...]:
    """Return sudden changes (sample, weight) that stand for changes of which some are gradual.

    Args:
        weight: the initial weight.
        changes: for each change its first sample, its duration in samples (0: at once), and the new weight.
    """
    steps: list[tuple[int, float]] = []
    for first, over, target in changes:
        count = min(RAMP_STEPS, over)
        for step in range(count):
            steps.append((first + step * over // count, weight + (target - weight) * (step + 0.5) / count))
        steps.append((first + over, target))
        weight = target
    return tuple(steps)


def _limit_of(source: OrderedSource) -> int:
    """Return how many samples a source gives, or ENDLESS if no run can draw so many, with room to multiply them."""
    return ENDLESS if source.limit is None or source.limit > ENDLESS // CYCLE else source.limit


def _first_exhaustion(segment: Segment, limits: Int64s) -> int:
    """Return the sample at which the first source reaches its limit, provided that the segment lasts that long."""
    per_cycle = np.array(segment.per_cycle, np.int64)
    limited = np.flatnonzero((per_cycle > 0) & (limits < ENDLESS))
    if not limited.size:
        return ENDLESS
    cycle = _cycle(segment.per_cycle)
    turns, rank = np.divmod(limits[limited] - segment.drawn[limited] - 1, per_cycle[limited])
    last = turns * CYCLE + cycle.slots[cycle.begins[limited] + rank]
    return segment.first_sample + int(last.min()) + 1


def _drawn_within(segment: Segment, samples: int) -> Int64s:
    """Return how many of the first `samples` samples of a segment come from each source."""
    cycles, rest = divmod(samples, CYCLE)
    counts: Int64s = cycles * np.array(segment.per_cycle, np.int64)
    if rest:
        counts += np.bincount(_cycle(segment.per_cycle).source[:rest], minlength=len(counts))
    return counts


@lru_cache(maxsize=64)
def _cycle(per_cycle: tuple[int, ...]) -> Cycle:
    """Lay out one cycle.

    The ideal position of slot j of n of a source is (j + 1/2) / n of the cycle; sorting the positions of all sources
    spreads each one evenly, so that even a batch has the mixture's proportions.
    """
    counts = np.array(per_cycle, np.int64)
    begins = np.cumsum(counts) - counts
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(CYCLE) - begins[source]
    order = np.argsort((rank + 0.5) / counts[source], kind="stable")
    slots = np.empty(CYCLE, np.int64)
    slots[order] = np.arange(CYCLE)
    return Cycle(source[order], rank[order], slots, begins)


def _apportion(weights: npt.NDArray[np.float64], seats: int) -> Int64s:
    """Return whole numbers [len(weights)] in proportion to the weights that add up to `seats`, by largest remainder."""
    exact = weights / np.sum(weights) * seats
    counts: Int64s = np.floor(exact).astype(np.int64)
    leftover = np.argsort(counts - exact, kind="stable")[: seats - int(counts.sum())]
    counts[leftover] += 1
    return counts
