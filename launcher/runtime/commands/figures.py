"""Make figures without a window: panels to draw in, colours from light to dark, and PNG files.

Nothing here uses pyplot, which keeps every figure until it is closed and looks for a window.
"""

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from plumbline.launcher.runtime.system.files import write_whole

DPI = 144


def panels(
    rows: int,
    columns: int,
    size: tuple[float, float],
    margin: tuple[float, float] = (0.0, 0.0),
    **sharing: Any,
) -> tuple[Figure, Any]:
    """Return a new figure and its axes, [rows, columns].

    Args:
        rows: number of rows of panels.
        columns: number of columns of panels.
        size: width and height of one panel, inches.
        margin: extra width and height of the figure, inches.
        sharing: sharex and sharey of matplotlib's `Figure.subplots`.
    """
    figure = Figure(figsize=(size[0] * columns + margin[0], size[1] * rows + margin[1]))
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def shades(count: int) -> Any:
    """Return colours, [count, 4] in RGBA, from dark blue to green; the yellow of the scale's end is hard to see."""
    return matplotlib.colormaps["viridis"](0.9 * np.arange(count) / max(1, count - 1))


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """Return a figure as a PNG file."""
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    write_whole(path, png(figure))
