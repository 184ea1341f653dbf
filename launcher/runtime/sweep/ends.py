"""Tell where the best of a grid lies at its end, so that a wider one may hold a better."""

from collections.abc import Iterator, Mapping, Sequence

from plumbline.launcher.runtime.sweep.result import Label


def axes_at_end(best: Mapping[str, Label], points: Sequence[Mapping[str, Label]]) -> Iterator[str]:
    """Yield each axis of numbers on which a point has the smallest or largest that was tried beside it.

    Args:
        best: axis -> label of the point.
        points: the same of every point of the grid, `best` among them.
    """
    for axis, value in best.items():
        line = [point.get(axis) for point in points if {**point, axis: None} == {**best, axis: None}]
        if len(line) > 1 and all(type(other) in (int, float) for other in line):
            tried = [float(str(other)) for other in line]
            if float(str(value)) in (min(tried), max(tried)):
                yield axis
