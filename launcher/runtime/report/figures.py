"""Draw the figures of a report, each a PNG: curves over tokens, and maps of depth against training."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import FuncFormatter

from plumbline.launcher.runtime.report.history import History, Series
from plumbline.launcher.runtime.system.figures import panels, png, shades

SIZE = (5.2, 3.0)  # of one panel, inches
DPI = 90  # a report holds many figures


def curves(panels: Mapping[str, Mapping[str, Series]], log: frozenset[str] = frozenset()) -> bytes:
    """Draw panels side by side, one for each title: name -> series over tokens; `log` names those of a log scale."""

    def draw(axes: Axes, title: str) -> None:
        for name, series in panels[title].items():
            axes.plot(
                series.tokens, series.values, label=name, linewidth=1, marker="." if len(series.steps) < 30 else ""
            )
        if title in log and any((series.values > 0).any() for series in panels[title].values()):
            axes.set_yscale("log")
        if len(panels[title]) > 1:
            axes.legend(fontsize=7)

    return _panels(list(panels), draw)


def by_layer(history: History, quantities: Mapping[str, str], log: frozenset[str] = frozenset()) -> bytes:
    """Draw one panel for each quantity (-> its title), with a line for each block, dark where deep."""

    def draw(axes: Axes, quantity: str) -> None:
        layers = history.layers(quantity)
        colours = shades(len(layers))[::-1]
        for index, (place, series) in enumerate(layers.items()):
            mark = "." if len(series.steps) < 30 else ""
            axes.plot(series.tokens, series.values, color=colours[index], linewidth=1, marker=mark, label=place)
        if quantity in log and any((series.values > 0).any() for series in layers.values()):
            axes.set_yscale("log")
        axes.set_title(quantities[quantity], fontsize=9)
        if len(layers) <= 8:
            axes.legend(fontsize=6)

    return _panels(list(quantities), draw)


def maps(history: History, quantities: Mapping[str, str], log: frozenset[str] = frozenset()) -> bytes:
    """Draw one heat map for each quantity (-> its title): depth upwards, observations to the right."""

    def draw(axes: Axes, quantity: str) -> None:
        layers = history.layers(quantity)
        steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
        grid = np.full((len(layers), len(steps)), np.nan)
        for row, series in enumerate(layers.values()):
            grid[row, np.searchsorted(steps, series.steps)] = series.values
        grid[~np.isfinite(grid)] = np.nan  # left white
        use_log = quantity in log and bool((grid > 0).any())
        image = axes.imshow(
            np.where(grid > 0, grid, np.nan) if use_log else grid,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            norm=LogNorm() if use_log else Normalize(),
        )
        ticks = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
        axes.set_xticks(ticks, [f"{steps[tick]:.0f}" for tick in ticks])
        shown = range(0, len(layers), -(-len(layers) // 12))
        axes.set_yticks(list(shown), [list(layers)[row] for row in shown])
        axes.set_ylabel("block", fontsize=8)
        axes.set_title(quantities[quantity], fontsize=9)
        scale = axes.figure.colorbar(image, ax=axes, format=FuncFormatter(lambda value, _: f"{value:g}"))
        scale.ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        scale.ax.tick_params(which="both", labelsize=8)

    return _panels(list(quantities), draw, x_label="step")


def _panels(names: list[str], draw: Callable[[Axes, str], None], x_label: str = "tokens") -> bytes:
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure, grid = panels(rows, columns, SIZE)
    for axes, name in zip(grid.flat, names, strict=False):
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(x_label, fontsize=8)
        axes.tick_params(labelsize=7)
        draw(axes, name)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    return png(figure, DPI)
