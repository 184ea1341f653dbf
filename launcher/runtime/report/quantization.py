"""Make the page of a grid of models and recipes: the cost of each recipe for each model."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from plumbline.launcher.runtime.quantize.curves import Lines, by_bits, by_tokens, correlations, outlier_lines
from plumbline.launcher.runtime.quantize.report import HEADER, OUTLIERS, about, by_model, cells_of, delta_of, in_order
from plumbline.launcher.runtime.quantize.row import Row
from plumbline.launcher.runtime.quantize.rows import ROWS, read_rows
from plumbline.launcher.runtime.report import figures, html
from plumbline.launcher.runtime.report.figures import Scale
from plumbline.launcher.runtime.report.html import Cell, Figure, Group, Shaded

MODELS, GRID = "Models", "Models and recipes"
LEAST = 1e-5  # nats: smallest noise floor to use as the unit of a scale
LARGEST = {"kurtosis": "kurtosis", "mmr": "max-median ratio"}
Models = Sequence[tuple[str, Sequence[Row]]]


def make(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the page of a folder of rows, its JSON document, and a line about it.

    Raises:
        ValueError: rows.jsonl is damaged or empty; names the file and the line.
    """
    rows = read_rows(folder)
    if not rows:
        raise ValueError(f"{folder / ROWS}: has no rows yet")
    models = by_model(rows)
    names = _short([name for name, _ in models])
    groups = [Group("Curves", "", [*_curves(rows)]), *_intervals(models, names)]
    shown = [group for group in groups if group.figures]
    title, recipes = folder.resolve().name, len({row.recipe for row in rows})
    text = html.document(
        title,
        [
            f"<h1>{escape(title)}</h1><p>What quantization costs: {recipes} recipes, {len(models)} models.</p>",
            html.contents([MODELS, GRID, *(group.title for group in shown), *names]),
            html.heading(MODELS),
            html.facts((name, "; ".join(about(own[0]))) for name, (_, own) in zip(names, models, strict=True)),
            html.heading(
                GRID, "Loss added, nats per token, the least first. In brackets: smaller than the noise floor."
            ),
            _grid(models, names),
            *map(html.group, shown),
            *_tables(models, names),
        ],
    )
    return text, {"rows": [row.to_json() for row in rows]}, [f"{recipes} recipes, {len(models)} models"]


def _short(names: Sequence[str]) -> list[str]:
    """Return names without their common folders."""
    parts = [Path(name).parts for name in names]
    same = 0
    while len(names) > 1 and all(len(own) > same + 1 and own[same] == parts[0][same] for own in parts):
        same += 1
    return ["/".join(own[same:]) for own in parts]


def _grid(models: Models, names: Sequence[str]) -> str:
    """Return a table with a row per recipe and a column per model, darker for higher cost."""
    of = {(row.recipe, number): row for number, (_, own) in enumerate(models) for row in own}
    recipes = sorted({recipe for recipe, _ in of}, key=lambda recipe: _mean_cost(of, recipe, len(models)))
    rows: list[list[Cell]] = []
    for recipe in recipes:
        found = [of.get((recipe, number)) for number in range(len(models))]
        stored = [row.rounding.stored_bits for row in found if row is not None and row.rounding.stored_bits is not None]
        ends = dict.fromkeys(f"{end(stored):.2f}" for end in (min, max) if stored)
        shaded = [Shaded("", 0.0) if row is None else Shaded(delta_of(row), _darkness(row)) for row in found]
        rows.append([recipe, " to ".join(ends), *shaded])
    return html.table(["recipe", "bits stored", *names], rows)


def _mean_cost(of: dict[tuple[str, int], Row], recipe: str, count: int) -> float:
    deltas = [of[recipe, number].damage.delta for number in range(count) if (recipe, number) in of]
    return math.inf if any(map(math.isnan, deltas)) else sum(deltas) / len(deltas)


def _darkness(row: Row) -> float:
    """Return 0 for costs within the noise and 1 for a nat or more, on a logarithmic scale."""
    if math.isnan(row.damage.delta):
        return 1.0
    floor = max(row.noise_floor, LEAST)
    return float(np.clip(np.log(max(row.damage.delta, floor) / floor) / np.log(1 / floor), 0, 1))


def _curves(rows: Sequence[Row]) -> Iterator[Figure]:
    floor = max(row.noise_floor for row in rows)
    if bits := by_bits(rows):
        text = "Nats that recipes add which round weights alone; dotted: the noise floor."
        yield Figure("Loss added over bits", text, _lines(bits, Scale("bits of the weights"), floor))
    if tokens := by_tokens(rows):
        text = "Nats that a recipe adds to checkpoints of different age; dotted: the noise floor."
        scale = Scale("training tokens for each parameter", log=True)
        yield Figure("Loss added over training", text, _lines(tokens, scale, floor))
    for name in OUTLIERS:
        if lines := outlier_lines(rows, name):
            said = "; ".join(f"{recipe}: {correlation}" for recipe, correlation in correlations(lines).items())
            text = f"Nats that a recipe which rounds activations adds to each model. {said}"
            scale = Scale(f"{LARGEST[name]} of a layer's input, the largest", log=True)
            yield Figure(f"Loss added over {LARGEST[name]}", text, _lines(lines, scale, floor, dots=True))


def _lines(lines: Lines, scale: Scale, floor: float, dots: bool = False) -> bytes:
    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(lines.items()):
            x, y = np.array(points).T
            style = "none" if dots else "-"
            tint = figures.colour(number, len(lines))
            axes.plot(
                x, y, color=tint, marker="o", markersize=3.5, linewidth=1.3, linestyle=style, label=figures.plain(name)
            )
        figures.around_zero(axes, "y", max(floor, LEAST))
        axes.axhline(floor, color="#888", linewidth=0.8, linestyle=":")
        if len(lines) <= figures.NAMED:
            axes.legend(fontsize=figures.FONT - 1, frameon=False)

    return figures.one(draw, scale)


def _intervals(models: Models, names: Sequence[str]) -> Iterator[Group]:
    """Yield a figure for each model with the cost of each recipe and its 95 % interval."""
    text = "Dot: loss added; bar: its 95 % interval over other sequences; grey: smaller than the noise floor."
    found = [
        Figure(name, "", _interval([row for row in in_order(own) if math.isfinite(row.damage.delta)]))
        for name, (_, own) in zip(names, models, strict=True)
    ]
    yield Group("Intervals", text, found)


def _interval(rows: Sequence[Row]) -> bytes:
    floor = max((max(row.noise_floor, LEAST) for row in rows), default=LEAST)

    def draw(axes: Axes) -> None:
        axes.axvspan(-floor, floor, color="#e4e4e4", linewidth=0)
        for place, row in enumerate(rows):
            axes.plot(row.damage.delta_interval, (place, place), color=figures.COLOURS[0], linewidth=1.5, alpha=0.6)
            axes.plot(row.damage.delta, place, "o", color=figures.COLOURS[0], markersize=4)
        axes.set_yticks(range(len(rows)), [figures.plain(row.recipe) for row in rows], fontsize=figures.FONT - 2)
        axes.set_ylim(len(rows) - 0.4, -0.6)

    scale = Scale("loss added, nats per token", linear_to=floor)
    return figures.one(draw, scale, (figures.SIZE[0], 0.9 + 0.19 * max(2, len(rows))))


def _tables(models: Models, names: Sequence[str]) -> Iterator[str]:
    for name, (_, own) in zip(names, models, strict=True):
        yield html.heading(name) + html.table(HEADER, map(cells_of, in_order(own)))
