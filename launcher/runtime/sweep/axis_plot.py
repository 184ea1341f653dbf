"""Draw the results of any sweep: the loss over each of its axes, and the training curves of its runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from plumbline.launcher.runtime.config.run_files import METRICS
from plumbline.launcher.runtime.report import figures
from plumbline.launcher.runtime.report.figures import Line, Scale
from plumbline.launcher.runtime.report.history import read_history
from plumbline.launcher.runtime.report.html import Figure
from plumbline.launcher.runtime.sweep.grid import Point
from plumbline.launcher.runtime.sweep.result import Result

DRAWN = 10  # most settings of the other axes whose colours can be told apart
CURVES = 100  # runs
DECADE = 8  # ratio of the ends of an axis from which it is logarithmic


def by_axis(points: Sequence[Point]) -> Iterator[Figure]:
    """Yield the loss over each axis with more than one value, without points that have no loss.

    Args:
        points: points, best first.
    """
    for axis in dict.fromkeys(axis for point in points for axis in point.labels):
        known = [point for point in points if point.loss is not None and axis in point.labels]
        if len({str(point.labels[axis]) for point in known}) > 1:
            numbers = all(type(point.labels[axis]) in (int, float) for point in known)
            yield (_over_numbers if numbers else _over_labels)(axis, known)


def curves(results: Sequence[Result]) -> Iterator[Figure]:
    """Yield the training loss of the runs whose folders exist, darker for lower held-out loss."""
    runs = {result.run: result.outcome.loss for result in results if result.outcome.loss is not None}
    ranked = [run for run in sorted(runs, key=lambda run: runs[run] or 0.0) if (Path(run) / METRICS).is_file()]
    drawn = []
    for number, run in enumerate(ranked[:CURVES]):
        loss = read_history(Path(run)).series.get("loss")
        if loss is not None:
            tint = figures.shade(number, min(len(ranked), CURVES))
            drawn.append(Line("", loss.tokens, figures.smooth(loss.values), tint))
    if drawn:
        text = f"Running mean of {len(drawn)} of {len(runs)} runs; the darker, the lower the held-out loss."
        yield Figure("Training loss", text, figures.lines(drawn[::-1], cut=True), "loss")


def _over_numbers(axis: str, points: Sequence[Point]) -> Figure:
    """Draw a line per setting of the other axes."""
    settings: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        others = ", ".join(str(label) for name, label in point.labels.items() if name != axis)
        settings.setdefault(others, []).append((float(str(point.labels[axis])), point.loss or 0.0))
    drawn = []
    for number, (name, pairs) in enumerate(list(settings.items())[:DRAWN]):
        x, y = np.array(sorted(pairs)).T
        drawn.append(Line(name, x, y, figures.colour(number, min(len(settings), DRAWN)), marked=True))
    ends = np.concatenate([line.x for line in drawn])
    scale = Scale(axis, log=bool(ends.min() > 0 and ends.max() >= DECADE * ends.min()))
    text = "A line for each setting of the other axes, the best first."
    if len(settings) > DRAWN:
        text = f"A line for each of the best {DRAWN} of {len(settings)} settings of the other axes."
    return Figure(axis, text, figures.lines(drawn, scale, cut=True))


def _over_labels(axis: str, points: Sequence[Point]) -> Figure:
    """Draw a row of dots per label, with the best point's label on top."""
    labels = list(dict.fromkeys(str(point.labels[axis]) for point in points))

    def draw(axes: Axes) -> None:
        for row, label in enumerate(labels):
            losses = [point.loss or 0.0 for point in points if str(point.labels[axis]) == label]
            axes.plot(losses, [row] * len(losses), "o", color=figures.COLOURS[0], alpha=0.5, markersize=5)
            axes.plot(min(losses), row, "|", color="black", markersize=14)
        axes.set_yticks(range(len(labels)), list(map(figures.plain, labels)), fontsize=figures.FONT - 1)
        axes.set_ylim(len(labels) - 0.5, -0.5)

    text = "A dot for each setting of the other axes, a bar at the best."
    image = figures.one(draw, Scale("held-out loss, nats"), (figures.SIZE[0], max(1.4, 0.9 + 0.28 * len(labels))))
    return Figure(axis, text, image)
