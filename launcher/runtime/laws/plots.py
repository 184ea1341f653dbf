"""Draw the figures of a fit: measured against predicted, f_x(P) with its band, damage of later quantization."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plumbline.launcher.runtime.commands.figures import panels, save_png, shades
from plumbline.model.scaling_laws.fit import Fit
from plumbline.model.scaling_laws.points import points

NAMES = {"w": "weights", "a": "activations", "kv": "KV cache"}


def plot_fit(fit: Fit, curves: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the figures that the fit has data for, and return their files."""
    figures = {"predicted.png": _predicted(fit)}
    if curves:
        figures["f.png"] = _fractions(curves)
    if len(fit.train.post_deltas()[1]):
        figures["post_delta.png"] = _post_deltas(fit)
    for name, figure in figures.items():
        save_png(figure, folder / name)
    return [folder / name for name in figures]


def _axes(across: str, up: str) -> tuple[Figure, Axes]:
    figure, [[axes]] = panels(1, 1, (5.0, 4.0))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def _predicted(fit: Fit) -> Figure:
    figure, axes = _axes("predicted loss (nats per token)", "measured loss (nats per token)")
    for name, part in (("fitted", fit.train), ("held out", fit.held_out)):
        if len(part.at):
            axes.plot(fit.law.loss(part.at), part.loss, "o", markersize=3, alpha=0.6, label=name)
    ends = [fit.train.loss.min(), fit.train.loss.max()]
    axes.plot(ends, ends, color="#666", linewidth=1)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _fractions(curves: Mapping[str, Any]) -> Figure:
    figure, axes = _axes("bits in training, P", "f(P) = effective / actual parameters")
    for index, curve in curves.items():
        (line,) = axes.plot(curve["bits"], curve["f"], label=NAMES[index])
        if "low" in curve:
            axes.fill_between(
                curve["bits"], curve["low"], curve["high"], color=line.get_color(), alpha=0.2, linewidth=0
            )
    axes.legend(fontsize=8, frameon=False)
    return figure


def _post_deltas(fit: Fit) -> Figure:
    """Draw measured deltas as dots, and a line for each width and size of the model."""
    figure, axes = _axes("tokens per parameter, D / N", "added by quantization after training (nats)")
    paired, deltas = fit.train.post_deltas()
    widths = np.unique(paired.at.post_bits)
    for bits, colour in zip(widths, shades(len(widths)), strict=True):
        here = paired.at.post_bits == bits
        ratio = paired.at.tokens[here] / paired.at.parameters[here]
        axes.plot(ratio, deltas[here], "o", markersize=3, color=colour, label=f"{bits:g} bits")
        high = here & ~paired.at.quantized
        for size in np.unique(paired.at.parameters[high]):
            tokens = np.unique(paired.at.tokens[high & (paired.at.parameters == size)])
            line = fit.law.post_delta(points(size, tokens, post_bits=bits))
            axes.plot(tokens / size, line, color=colour, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False, title="lines: the law, bf16 in training", title_fontsize=7)
    return figure
