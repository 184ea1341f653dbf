"""Draw a learning-rate transfer sweep: loss against learning rate, one panel per family and curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from plumbline.launcher.runtime.commands.figures import panels, save_png, shades
from plumbline.launcher.runtime.sweep.lr_transfer import LrTransferSummary, SizeSummary

SMALL = {"fontsize": 8, "title_fontsize": 8}


def plot(summary: LrTransferSummary, path: Path) -> None:
    """Draw the panels: rows for width and depth, a column per curve, a colour per size."""
    rows = summary.shown
    labels = list(next(iter(rows.values())))
    figure, axes = panels(len(rows), len(labels), (2.5, 2.4), margin=(1.2, 0.5), sharex=True, sharey="row")
    for row, (family, curves) in zip(axes, rows.items(), strict=True):
        sizes = sorted({size for curve in curves.values() for size in curve.sizes})
        colours = shades(len(sizes))
        for axis, label in zip(row, labels, strict=True):
            for size, colour in zip(sizes, colours, strict=True):
                if label in curves and size in curves[label].sizes:  # grown both ways, only some labels may be
                    _draw(axis, curves[label].sizes[size], colour)
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
            axis.set_title(f"{label}: {family}", fontsize=10)
        low, high = _range([found for curve in curves.values() for found in curve.sizes.values()])
        row[0].set_ylim(low, high)
        row[0].set_ylabel("held-out loss (nats)")
        handles = [Line2D([], [], color=colour, marker="o", markersize=3) for colour in colours]
        names = [str(size) for size in sizes]
        row[-1].legend(handles, names, title=family, loc="center left", bbox_to_anchor=(1.02, 0.5), **SMALL)
    for axis in axes[-1]:
        axis.set_xlabel("learning rate at the base" if summary.axis == "optimizer.lr" else summary.axis)
    save_png(figure, path)


def _draw(axis: Any, size: SizeSummary, colour: Any) -> None:
    points = [point for point in size.points if point.loss is not None]
    if not points:
        return
    lrs, losses = [point.lr for point in points], [point.loss for point in points]
    errors = [point.error or 0.0 for point in points]
    axis.errorbar(lrs, losses, yerr=errors, color=colour, marker="o", markersize=3, linewidth=1.2)
    if size.best.optimum is not None:
        axis.axvline(2**size.best.optimum, color=colour, linewidth=1, linestyle=":" if size.best.edge else "--")


def _range(sizes: Sequence[SizeSummary]) -> tuple[float, float]:
    """Return a range of losses that ends above every curve's minimum, so that diverging ones do not flatten others."""
    curves = [[point.loss for point in size.points if point.loss is not None] for size in sizes]
    minima = [min(curve) for curve in curves if curve]
    if not minima:
        return 0.0, 1.0
    low, highest_minimum = min(minima), max(minima)
    high = highest_minimum + max(highest_minimum - low, 0.25)
    return low - 0.05 * (high - low), high
