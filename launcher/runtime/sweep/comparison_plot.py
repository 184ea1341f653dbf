"""Draw a comparison: a row per variant at its best point, best on top, with a dot per seed."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plumbline.launcher.runtime.commands.figures import panels, save_png
from plumbline.launcher.runtime.sweep.comparison import ComparisonSummary, Variant

PLAIN, THOUGHTS = "#1f77b4", "#ff7f0e"
ROW, MARGIN = 0.26, 0.9  # inches


def plot(summary: ComparisonSummary, path: Path) -> None:
    """Write the figure."""
    save_png(draw(summary), path)


def draw(summary: ComparisonSummary) -> Figure:
    """Draw a panel per table, with exact match if available, else the held-out loss, and a bar at each mean."""
    tables = summary.tables
    columns = min(2, len(tables))
    rows = -(-len(tables) // columns)
    figure, grid = panels(rows, columns, (6.5, ROW * max(map(len, tables.values())) + MARGIN))
    for axes, (table, variants) in zip(grid.flat, tables.items(), strict=False):
        _panel(axes, variants)
        if len(tables) > 1:
            axes.set_title(table, fontsize=10, loc="left")
    for axes in grid.flat[len(tables) :]:
        axes.set_visible(False)
    return figure


def _panel(axes: Axes, variants: Mapping[str, Variant]) -> None:
    matched = any("exact_match" in variant.seeds for variant in variants.values())
    plain = "exact_match" if matched else "loss"
    thinks = any(f"thinking_{plain}" in variant.seeds for variant in variants.values())
    for row, variant in enumerate(variants.values()):
        if variant.best is None:
            axes.text(
                0.5,
                row,
                "no point is complete",
                fontsize=7,
                color="#666",
                ha="center",
                va="center",
                transform=axes.get_yaxis_transform(),
            )
            continue
        both = f"thinking_{plain}" in variant.seeds
        _mark(axes, variant, plain, row - 0.17 * both, PLAIN)
        _mark(axes, variant, f"thinking_{plain}", row + 0.17, THOUGHTS)
    axes.set_yticks(range(len(variants)), list(variants), fontsize=8)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("exact match" if matched else "held-out loss (nats)", fontsize=9)
    if matched:
        axes.set_xlim(-0.03, 1.03)
    if thinks:
        colours = {"plain": PLAIN, "with thoughts": THOUGHTS}
        handles = [Line2D([], [], color=colour, marker="o", markersize=4, linewidth=0) for colour in colours.values()]
        axes.legend(
            handles, list(colours), fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False
        )


def _mark(axes: Axes, variant: Variant, key: str, height: float, colour: str) -> None:
    """Draw a dot per seed and a bar at their mean, if the variant has this quantity."""
    values = list(variant.seeds.get(key, {}).values())
    if not values or variant.at_best is None:
        return
    axes.plot(values, [height] * len(values), "o", color=colour, markersize=4, alpha=0.5, markeredgewidth=0)
    axes.plot(variant.at_best[key].mean, height, "|", color=colour, markersize=11, markeredgewidth=1.8)
