"""Draw a coordinate check: gated quantities against size, one panel per quantity and one line per rule."""

from pathlib import Path

from plumbline.launcher.runtime.commands.figures import panels, save_png
from plumbline.launcher.runtime.sweep.coordinate_check import CoordinateCheckSummary

PANELS = (
    ("size/residual", "stream out of the last block"),
    ("change/residual", "its change since the start"),
    ("change/block", "change of one block's share"),
    ("spectral_change/hidden", "change of a hidden matrix (spectral)"),
    ("size/logits", "logits"),
)


def plot(summary: CoordinateCheckSummary, path: Path) -> None:
    """Draw the panels: rows for width and depth, seed means at the last recorded step, on log-log axes."""
    rows = {family: curves for family, curves in summary.families.items() if curves}
    if not rows:
        return
    figure, axes = panels(len(rows), len(PANELS), (2.7, 2.7))
    for row, (family, curves) in zip(axes, rows.items(), strict=True):
        for axis, (quantity, title) in zip(row, PANELS, strict=True):
            for label, curve in curves.items():
                step, found = max(curve.slopes[quantity].items(), key=lambda item: item[0])
                sizes, values = zip(*found.values.items(), strict=True)
                axis.plot(sizes, values, marker="o", markersize=3, linewidth=1.2, label=label)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_title(f"{title}, step {step}", fontsize=8)
            axis.set_xlabel(family)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    save_png(figure, path)
