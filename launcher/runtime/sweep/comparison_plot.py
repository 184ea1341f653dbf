"""Draw a comparison: a row for each variant at its best point, the best on top; a dot for each seed."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plumbline.launcher.runtime.system.figures import panels, save_png

PLAIN, THOUGHTS = "#1f77b4", "#ff7f0e"
ROW, MARGIN = 0.26, 0.9  # inches


def plot(summary: dict[str, Any], path: Path) -> None:
    """Write the figure."""
    save_png(draw(summary), path)


def draw(summary: dict[str, Any]) -> Figure:
    """Draw a panel for each table: exact match where there is any, else the held-out loss; a bar at each mean."""
    columns = min(2, len(summary))
    rows = -(-len(summary) // columns)
    figure, grid = panels(rows, columns, (6.5, ROW * max(map(len, summary.values())) + MARGIN))
    for axes, (table, variants) in zip(grid.flat, summary.items(), strict=False):
        _panel(axes, variants)
        if len(summary) > 1:
            axes.set_title(table, fontsize=10, loc="left")
    for axes in grid.flat[len(summary) :]:
        axes.set_visible(False)
    return figure


def _panel(axes: Axes, variants: dict[str, Any]) -> None:
    matched = any("exact_match" in facts["seeds"] for facts in variants.values())
    thinks = any("thinking_exact_match" in facts["seeds"] for facts in variants.values())
    for row, facts in enumerate(variants.values()):
        if facts["best"] is None:
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
        both = "thinking_exact_match" in facts["seeds"]
        _mark(axes, facts, "exact_match" if matched else "loss", row - 0.17 * both, PLAIN)
        _mark(axes, facts, "thinking_exact_match", row + 0.17, THOUGHTS)
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


def _mark(axes: Axes, facts: dict[str, Any], key: str, height: float, colour: str) -> None:
    """Draw a dot for each seed and a bar at their mean, of a variant that has this quantity."""
    values = list(facts["seeds"].get(key, {}).values())
    if not values:
        return
    axes.plot(values, [height] * len(values), "o", color=colour, markersize=4, alpha=0.5, markeredgewidth=0)
    axes.plot(facts["points"][facts["best"]][key][0], height, "|", color=colour, markersize=11, markeredgewidth=1.8)
