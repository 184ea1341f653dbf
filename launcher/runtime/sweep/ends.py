"""Detect a best point at the end of a grid, so that a wider grid may have a better one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from plumbline.launcher.runtime.sweep.result import Label


def axes_at_end(
    best: Mapping[str, Label], points: Sequence[Mapping[str, Label]]
) -> Iterator[tuple[str, Literal["smallest", "largest"]]]:
    """Yield each numeric axis on which a point has an extreme of the values tried, other axes being equal, and which.

    Args:
        best: axis -> label of the point.
        points: the same for every point of the grid, including `best`.
    """
    for axis, value in best.items():
        others = [point for point in points if axis in point]  # points of another grid may lack the axis
        line = [point[axis] for point in others if {**point, axis: None} == {**best, axis: None}]
        if len(line) > 1 and all(type(other) in (int, float) for other in line):
            tried = [float(str(other)) for other in line]
            if float(str(value)) in (min(tried), max(tried)):
                yield axis, "smallest" if float(str(value)) == min(tried) else "largest"
