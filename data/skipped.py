"""Map steps to data when ranges of the data are left out, to step over samples that broke a run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

StepRange = tuple[int, int]
"""[first, stop) of data steps."""


@dataclass(frozen=True)
class SkippedData:
    """State which data a run leaves out. Data step d (from 0) is what step d takes if nothing is left out.

    Each step takes the next data step that is not left out, so the order of data stays a pure function of the step.
    """

    ranges: tuple[StepRange, ...] = ()
    """What is left out: sorted, disjoint and not adjacent, as `of` makes them."""

    @classmethod
    def of(cls, ranges: Iterable[StepRange]) -> "SkippedData":
        """Return an object that leaves out some ranges, in any order, which may overlap.

        Raises:
            ValueError: one is not a range.
        """
        joined: list[StepRange] = []
        for first, stop in sorted(ranges):
            if not 0 <= first < stop:
                raise ValueError(f"skipped data [{first}, {stop}): expected 0 <= first < stop")
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((first, stop))
        return cls(tuple(joined))

    @classmethod
    def from_json(cls, ranges: Any) -> "SkippedData":
        """Return an object that leaves out a list of pairs of integers.

        Raises:
            ValueError: it is not such a list.
        """
        try:
            pairs = [(first, stop) for first, stop in ranges]
        except (TypeError, ValueError) as error:
            raise ValueError(f"skipped data {ranges!r}: expected a list of pairs of data steps") from error
        if not all(type(number) is int for pair in pairs for number in pair):
            raise ValueError(f"skipped data {ranges!r}: expected whole numbers")
        return cls.of(pairs)

    def __or__(self, other: "SkippedData") -> "SkippedData":
        """Return an object that leaves out the ranges of both."""
        return self.of([*self.ranges, *other.ranges])

    def data_step(self, step: int) -> int:
        """Return the data step that step `step` (from 0) takes."""
        for first, stop in self.ranges:
            if step < first:
                break
            step += stop - first
        return step

    def step_of(self, data_step: int) -> int | None:
        """Return the step (from 0) that takes a data step, or None if it is left out."""
        before = 0
        for first, stop in self.ranges:
            if data_step < first:
                break
            if data_step < stop:
                return None
            before += stop - first
        return data_step - before


NOTHING = SkippedData()
