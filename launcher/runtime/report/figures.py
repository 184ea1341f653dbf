"""Draw the figures of pages, each a one-panel PNG: lines, lines per block, and maps of depth against training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize, to_hex
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator

from plumbline.launcher.runtime.commands.figures import panels, png, shades
from plumbline.launcher.runtime.report.history import Floats, Series, grid_of

SIZE = (5.4, 2.9)  # of a figure, inches
DPI = 130  # sharp in print and on dense screens
FONT = 9
FEW = 40  # points up to which each one is marked
SMOOTHED = 40  # number of windows in a run over which the loss is smoothed
CUT = 0.02  # share of points left above the range if they would flatten the others
COLOURS = (
    "#1f77b4", "#d95f02", "#1b9e77", "#7b5ea7", "#c2185b", "#8a6d3b", "#5f6b7a", "#b8a000", "#00a0b0", "#333333",
)  # fmt: skip
NAMED = 12  # most lines that a legend names; with more, colours say little
ALERT = "#c00000"
BLOCK = "block"


@dataclass(frozen=True)
class Line:
    """Hold one line of a figure."""

    name: str
    """Name in the legend; unnamed lines are not listed."""
    x: Floats
    y: Floats
    colour: str = COLOURS[0]
    faint: bool = False
    marked: bool = False
    """Mark each point, however many there are."""

    def after(self, start: float) -> "Line":
        """Return the part of the line from `start` on."""
        late = self.x >= start
        return replace(self, x=self.x[late], y=self.y[late])


@dataclass(frozen=True)
class Scale:
    """Describe the horizontal axis."""

    label: str
    unit: float = 1.0
    """Size of one unit of the label in the units of the numbers."""
    log: bool = False
    linear_to: float = 0.0
    """The axis is linear up to here on both sides of zero, and logarithmic beyond; 0: not mixed."""


TOKENS = Scale("training tokens")


def colour(number: int, count: int) -> str:
    """Return the colour of item `number` of `count`; beyond ten, shades that are hard to tell apart."""
    if count <= len(COLOURS):
        return COLOURS[number]
    return shade(number, count)


def shade(number: int, count: int) -> str:
    """Return one of several colours from dark to light."""
    return str(to_hex(shades(count)[number]))


def smooth(values: Floats) -> Floats:
    """Return the running mean of the finite values over a window of the run."""
    reach = len(values) // (2 * SMOOTHED)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    last, first = np.minimum(places + reach + 1, len(values)), np.maximum(places - reach, 0)
    known = counts[last] - counts[first]
    return np.where(known > 0, (sums[last] - sums[first]) / np.maximum(known, 1), np.nan)


def lines(
    drawn: Sequence[Line],
    scale: Scale = TOKENS,
    log: bool = False,
    cut: bool = False,
    alerts: Sequence[float] = (),
) -> bytes:
    """Draw lines.

    Args:
        drawn: in the order of the legend.
        scale: scale of the horizontal axis.
        log: draw on a logarithmic scale.
        cut: leave out the few highest points if they would flatten the others.
        alerts: horizontal positions to mark.
    """

    def draw(axes: Axes) -> None:
        for line in drawn:
            _line(axes, line, scale)
        values = np.concatenate([line.y[np.isfinite(line.y)] for line in drawn] or [np.zeros(0)])
        if log and (values > 0).any():
            _log_scale(axes, values)
        elif cut and (limits := cut_off(values)) is not None:
            axes.set_ylim(*limits)
        for place in alerts:
            axes.axvline(place / scale.unit, color=ALERT, linewidth=0.8, linestyle=":")
        _legend(axes, [line for line in drawn if line.name])

    return one(draw, scale)


def by_layer(layers: Mapping[str, Series], log: bool = False, band: tuple[Series, Series] | None = None) -> bytes:
    """Draw a line per block, lighter for deeper ones; `band` holds the lower and upper bounds of all."""

    def draw(axes: Axes) -> None:
        colours = shades(len(layers))
        if band is not None:
            low, high = band
            axes.fill_between(low.tokens, low.values, high.values, color="#ddd", linewidth=0)
        for tint, series in zip(colours, layers.values(), strict=True):
            _line(axes, Line("", series.tokens, series.values, tint), TOKENS)
        values = np.concatenate([series.values for series in layers.values()])
        finite = values[np.isfinite(values)]
        if log and (finite > 0).any():
            _log_scale(axes, finite)
        if len(layers) > 1:
            _bar_of_blocks(axes, list(layers), colours)

    return one(draw)


def depth_map(layers: Mapping[str, Series], log: bool = False) -> bytes:
    """Draw depth upwards, training to the right, and values as colours; values that are not finite stay white."""

    def draw(axes: Axes) -> None:
        _, tokens, grid = grid_of(layers)
        grid[~np.isfinite(grid)] = np.nan
        use_log = log and bool((grid > 0).any())
        shown = np.where(grid > 0, grid, np.nan) if use_log else grid
        norm = LogNorm() if use_log else Normalize()
        image = axes.pcolormesh(_edges(tokens), np.arange(len(layers) + 1) - 0.5, shown, norm=norm, rasterized=True)
        shown_rows = range(0, len(layers), -(-len(layers) // 12))
        axes.set_yticks(list(shown_rows), [plain(list(layers)[row]) for row in shown_rows])
        axes.set_ylabel(BLOCK, fontsize=FONT)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
        if use_log:
            _log_ticks(bar.ax.yaxis, np.nanmin(shown), np.nanmax(shown))
        bar.ax.tick_params(which="both", labelsize=FONT - 1)
        axes.grid(False)

    return one(draw)


def one(draw: Callable[[Axes], None], scale: Scale = TOKENS, size: tuple[float, float] = SIZE) -> bytes:
    """Draw one panel."""
    figure, grid = panels(1, 1, size)
    axes = grid[0, 0]
    axes.tick_params(labelsize=FONT - 1)
    axes.yaxis.set_major_formatter(SHORT)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    _to_the_right(axes, scale)
    return png(figure, DPI)


def _line(axes: Axes, line: Line, scale: Scale) -> None:
    mark = "." if line.marked or (len(line.x) < FEW and not line.faint) else ""
    width, alpha = (0.6, 0.35) if line.faint else (1.3, 1.0)
    x = line.x / scale.unit
    axes.plot(x, line.y, color=line.colour, linewidth=width, alpha=alpha, marker=mark, markersize=4)


def _legend(axes: Axes, named: Sequence[Line]) -> None:
    if not named or len(named) > NAMED or (len(named) == 1 and len(axes.lines) == 1):
        return
    handles = [axes.plot([], [], color=line.colour, marker="." if line.marked else "")[0] for line in named]
    axes.legend(handles, [plain(line.name) for line in named], fontsize=FONT - 1, frameon=False)


def _bar_of_blocks(axes: Axes, names: Sequence[str], colours: Floats) -> None:
    count = len(names)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    bar = axes.figure.colorbar(ScalarMappable(norm, ListedColormap(colours)), ax=axes, pad=0.02)
    shown = range(0, count, -(-count // 12))
    bar.set_ticks(list(shown), labels=[plain(names[row]) for row in shown])
    bar.ax.tick_params(which="minor", length=0)
    bar.ax.tick_params(labelsize=FONT - 1)
    bar.set_label(BLOCK, fontsize=FONT)


def _to_the_right(axes: Axes, scale: Scale) -> None:
    axes.set_xlabel(plain(scale.label), fontsize=FONT)
    if scale.linear_to:
        around_zero(axes, "x", scale.linear_to)
    elif scale.log:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, *axes.dataLim.intervalx)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
        axes.xaxis.set_major_formatter(SHORT)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Write plain numbers on a logarithmic axis: 1, 2, 5, 10, or even steps if it spans less than a decade."""
    axis.set_major_locator(
        MaxNLocator(5) if high < 10 * low else LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,))
    )
    axis.set_major_formatter(SHORT)
    axis.set_minor_locator(NullLocator())


def around_zero(axes: Axes, name: Literal["x", "y"], linear_to: float) -> None:
    """Make an axis logarithmic on both sides of zero, and linear up to a threshold."""
    scale, axis = (axes.set_xscale, axes.xaxis) if name == "x" else (axes.set_yscale, axes.yaxis)
    scale("symlog", linthresh=linear_to)
    locator = SymmetricalLogLocator(base=10, linthresh=linear_to)
    locator.set_params(numticks=7)
    axis.set_major_locator(locator)
    axis.set_major_formatter(SHORT)
    axis.set_minor_locator(NullLocator())


def _log_scale(axes: Axes, values: Floats) -> None:
    axes.set_yscale("log")
    positive = values[values > 0]
    _log_ticks(axes.yaxis, positive.min(), positive.max())


def cut_off(values: Floats) -> tuple[float, float] | None:
    """Return a range that leaves out the few highest values if that makes a big difference, else None."""
    if not len(values):
        return None
    low, top, highest = values.min(), float(np.quantile(values, 1 - CUT)), values.max()
    room = 0.05 * (top - low)
    return (low - room, top + room) if highest - low > 1.5 * (top - low) > 0 else None


def _edges(tokens: Floats) -> Floats:
    """Return where the cells of observations meet: halfway between them."""
    if len(tokens) == 1:
        return np.array([0.0, 2 * max(tokens[0], 1.0)])
    middle = (tokens[1:] + tokens[:-1]) / 2
    return np.concatenate([[2 * tokens[0] - middle[0]], middle, [2 * tokens[-1] - middle[-1]]])


def plain(text: str) -> str:
    """Escape text so that matplotlib finds no formula in it."""
    return text.replace("$", r"\$")


def short(value: float) -> str:
    """Format a number in few characters: 0.002, 12.5, 40k, 1.3M."""
    size = abs(value)
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), (1, ""))
    if size < 1e4 or size >= 1e15:
        return f"{value:.4g}"
    return f"{value / unit:.4g}{name}"


UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
SHORT = FuncFormatter(lambda value, _: short(value))
