"""Draw the four curves of a quantization report into one PNG file.

1. what rounding costs against bits of the weights, a line for each way of rounding them
2. the same against training tokens per parameter, a line for each recipe that several checkpoints were given
3. against the kurtosis and the max-median ratio of the layers' inputs
4. measured against predicted by a fitted law
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes

from plumbline.launcher.runtime.commands.figures import panels, save_png
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.quantize.row import Row

Pairs = list[tuple[float, float]]
Lines = dict[str, Pairs]
Outlier = Literal["kurtosis", "mmr"]


def draw_curves(rows: Sequence[Row], predictions: Pairs | None, floor: float, path: Path) -> None:
    """Write the figure.

    Args:
        rows: of rows.jsonl.
        predictions: (predicted delta, delta) of each row that a law covers, or None without a law.
        floor: deltas below are noise, nats per token.
        path: PNG file.
    """
    figure, grid = panels(2, 2, (6.0, 4.5))
    _lines(grid[0, 0], by_bits(rows), floor, "bits of the weights")
    _lines(grid[0, 1], by_tokens(rows), floor, "training tokens per parameter")
    grid[0, 1].set_xscale("log")
    _outliers(grid[1, 0], rows)
    _predicted(grid[1, 1], predictions, floor)
    save_png(figure, path)


def by_bits(rows: Sequence[Row]) -> Lines:
    """Return (way of rounding, model) -> (bits, delta), for recipes that only round weights."""
    several = len({row.scored for row in rows}) > 1
    lines: dict[tuple[Any, ...], Pairs] = defaultdict(list)
    for row in rows:
        bits, way = row.bits.of_weights_alone, _way(row.recipe)
        if bits is not None:
            lines[f"{way}, {_short(row)}" if several else way, row.scored].append((bits, row.damage.delta))
    return _named(lines, least=2)


def by_tokens(rows: Sequence[Row]) -> Lines:
    """Return recipe -> (training tokens per parameter, delta), for recipes with checkpoints of different ages."""
    lines: dict[tuple[Any, ...], Pairs] = defaultdict(list)
    for row in rows:
        if row.checkpoint.tokens_per_parameter is not None:
            on = row.checkpoint.average is not None, *row.text.scoring
            lines[row.recipe, on].append((row.checkpoint.tokens_per_parameter, row.damage.delta))
    return {name: points for name, points in _named(lines, least=2).items() if points[0][0] < points[-1][0]}


def outlier_lines(rows: Sequence[Row], quantity: Outlier) -> Lines:
    """Return recipe -> (the largest of a layer's input, delta) of each model, of recipes that round activations.

    Recipes of fewer than three models are left out. A run and its export are one model.
    """
    found: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        largest = row.rounding.kurtosis_largest if quantity == "kurtosis" else row.rounding.mmr_largest
        # An activation may make half of a layer's inputs 0: then a ratio to their median is meaningless
        pair = (math.nan if largest is None else largest, row.damage.delta)
        if row.bits.post_activation_bits is not None and all(map(math.isfinite, pair)):
            found[row.recipe, row.text.scoring].setdefault(row.base_loss_shown, pair)
    return _named({key: list(models.values()) for key, models in found.items()}, least=3)


def correlations(lines: Lines) -> dict[str, str]:
    """Return the rank correlation of each line in words; of those that have one."""
    found = {name: spearman(pairs) for name, pairs in lines.items()}
    return {
        name: f"Spearman {value:+.2f} over {len(lines[name])} models"
        for name, value in found.items()
        if not math.isnan(value)
    }


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation, -1 to 1, or nan if one side is constant."""
    from scipy import stats  # takes a second, and most pages of runs have no such lines

    sides = list(zip(*pairs, strict=True))
    return float(stats.spearmanr(*sides).statistic) if all(len(set(side)) > 1 for side in sides) else math.nan


def _way(recipe: str) -> str:
    """Return a recipe's name without its bits: rtn-w4-g128 -> rtn-w-g128."""
    return "-".join("w" if part[:1] == "w" and part[1:].isdigit() else part for part in recipe.split("-"))


def _short(row: Row) -> str:
    parts = Path(row.checkpoint.model).parts
    return "/".join(part for part in parts[-3:] if part not in ("runs", CHECKPOINTS))


def _named(lines: Mapping[tuple[Any, ...], Pairs], least: int) -> Lines:
    """Return the lines that have enough finite points, in order; (name, what it was scored on) -> points.

    Lines with the same name are numbered.
    """
    finite = {key: sorted(point for point in points if math.isfinite(point[1])) for key, points in lines.items()}
    known: Counter[str] = Counter()
    named: Lines = {}
    for (name, _), points in finite.items():
        if len(points) >= least:
            known[name] += 1
            named[name if known[name] == 1 else f"{name} ({known[name]})"] = points
    return named


def _lines(axes: Axes, lines: Lines, floor: float, label: str) -> None:
    for name, points in lines.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker="o", markersize=3, linewidth=1, label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("loss added (nats per token)")
    # Logarithmic where rounding costs something, linear around zero, since it may also help a little
    axes.set_yscale("symlog", linthresh=max(floor, 1e-5))
    axes.axhline(floor, color="#999", linewidth=0.8, linestyle=":")
    axes.grid(alpha=0.3)
    _legend_or_note(axes, lines, "no recipe has two points here")


def _outliers(axes: Axes, rows: Sequence[Row]) -> None:
    found = False
    markers: dict[Outlier, str] = {"kurtosis": "o", "mmr": "^"}
    for quantity, marker in markers.items():
        lines = outlier_lines(rows, quantity)
        said = correlations(lines)
        for recipe, pairs in lines.items():
            found = True
            x, y = zip(*pairs, strict=True)
            label = f"{recipe}, {quantity}, {said.get(recipe, f'{len(pairs)} models')}"
            axes.plot(x, y, marker, markersize=4, alpha=0.7, label=label)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_xlabel("largest of a layer's input")
    axes.set_ylabel("loss added, activations rounded (nats per token)")
    axes.grid(alpha=0.3)
    _legend_or_note(axes, found, "no recipe rounds activations of three models")


def _predicted(axes: Axes, pairs: Pairs | None, floor: float) -> None:
    if pairs:
        x, y = zip(*pairs, strict=True)
        axes.plot(x, y, "o", markersize=4, alpha=0.7, label=f"{len(pairs)} rows")
        ends = [min(x + y), max(x + y)]
        axes.plot(ends, ends, color="#999", linewidth=0.8)
        for scale in (axes.set_xscale, axes.set_yscale):
            _symlog(scale, floor)
    axes.set_xlabel("predicted by the law (nats per token)")
    axes.set_ylabel("measured (nats per token)")
    axes.grid(alpha=0.3)
    _legend_or_note(axes, pairs, "no law was given: --law" if pairs is None else "the law covers none of these rows")


def _symlog(scale: Callable[..., None], floor: float) -> None:
    scale("symlog", linthresh=max(floor, 1e-5))


def _legend_or_note(axes: Axes, content: object, note: str) -> None:
    if content:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, note, ha="center", va="center", color="#666", transform=axes.transAxes)
