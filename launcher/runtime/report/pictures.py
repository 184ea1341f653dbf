"""Draw examples of planning tasks with the true answer and the model's, green if right and red if wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi, sin
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.candidates import CandidatesConfig, ancestors
from plumbline.data.tasks.graphs import BAR, FIRST_NODE
from plumbline.data.tasks.maze import MazeConfig
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.data.tasks.sudoku import SudokuConfig
from plumbline.data.tasks.task import TaskConfig
from plumbline.launcher.runtime.commands.figures import panels, png
from plumbline.launcher.runtime.report.figures import DPI

Place = tuple[float, float]
RIGHT, WRONG, TRUE, QUIET = "#2ca02c", "#d62728", "#b7dfb7", "#aaaaaa"
SIZE = (3.1, 3.5)  # of one picture, inches
LISTED = 10  # most tokens of an answer that is written out below its picture


@dataclass(frozen=True)
class Answered:
    """Hold one example and a model's answer."""

    number: int
    tokens: Int64s
    """[n]: tokens that the model reads."""
    answer: Int64s
    """[A]: true tokens of the answer."""
    predicted: Int64s
    """[A]: likeliest token at each position, given the true ones before it."""

    @property
    def solved(self) -> bool:
        """Return whether every token is right."""
        return bool((self.answer == self.predicted).all())


def draw(task: TaskConfig, rows: Sequence[Sequence[Answered]]) -> bytes:
    """Return a PNG with a row for each sequence of examples that has any."""
    rows = [row for row in rows if row]
    columns = max(map(len, rows))
    figure, grid = panels(len(rows), columns, SIZE)
    for places, row in zip(grid, rows, strict=True):
        for axes in places[len(row) :]:
            axes.set_visible(False)
        for axes, example in zip(places, row, strict=False):
            DRAW[task.name](axes, task, example)
            wrong = int((example.answer != example.predicted).sum())
            outcome = f"failed: {wrong} of {len(example.answer)} tokens wrong" if wrong else "solved"
            axes.set_title(f"example {example.number}, {outcome}", fontsize=8)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    return png(figure, DPI)


def star(axes: Axes, task: StarGraphConfig, example: Answered) -> None:
    """Draw the arms from the source outwards."""
    graph = task.star_of(example.tokens)
    places: dict[int, Place] = {graph.source: (0.0, 0.0)}
    for number, arm in enumerate(graph.arms):
        angle = pi / 2 - 2 * pi * (number + 0.5) / len(graph.arms)
        places |= {node: (step * cos(angle), step * sin(angle)) for step, node in enumerate(arm, start=1)}
    _lines(axes, [(a, b) for arm in graph.arms for a, b in pairwise([graph.source, *arm])], places, color=QUIET)
    _way(axes, places, example)
    _nodes(axes, places, {graph.source: "#a6cee3", graph.goal: "#fdd08a"})
    _list(axes, example)
    reach = task.path_length - 0.5  # two arms lie on one line, which has no height of its own
    axes.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))


def sudoku(axes: Axes, task: SudokuConfig, example: Answered) -> None:
    """Draw the grid with the predicted digits; given digits have a grey background."""
    size = task.size
    given, true, predicted = map(task.grid_of, (example.tokens[: size**2], example.answer, example.predicted))
    for row, column in np.ndindex(size, size):
        wrong = predicted[row, column] != true[row, column]
        colour = WRONG if wrong else "black" if given[row, column] else RIGHT
        if given[row, column]:
            axes.add_patch(Rectangle((column, row), 1, 1, color="#eeeeee", zorder=0))
        digit = str(predicted[row, column] or "-")
        axes.text(column + 0.5, row + 0.5, digit, color=colour, ha="center", va="center", fontsize=72 / size)
    box = round(size**0.5)
    for line in range(size + 1):
        axes.plot([0, size], [line, line], color="black", linewidth=0.4 if line % box else 1.5)
        axes.plot([line, line], [0, size], color="black", linewidth=0.4 if line % box else 1.5)
    axes.set_aspect("equal")
    axes.invert_yaxis()


def maze(axes: Axes, task: MazeConfig, example: Answered) -> None:
    """Draw walls, the true path, and the cell that the model predicts for each of its steps."""
    side = task.side
    for cell, other in task.walls_of(example.tokens):
        (row, column), beside = divmod(cell, side), other == cell + 1
        start, end = (
            ((column + 1, row), (column + 1, row + 1)) if beside else ((column, row + 1), (column + 1, row + 1))
        )
        axes.plot([start[0], end[0]], [start[1], end[1]], color="black", linewidth=1.2)
    axes.add_patch(Rectangle((0, 0), side, side, fill=False, linewidth=1.6))
    places = {FIRST_NODE + cell: (cell % side + 0.5, cell // side + 0.5) for cell in range(side**2)}
    _way(axes, places, example)
    origin, target = example.answer[[0, -1]].tolist()
    for node, mark in ((origin, "o"), (target, "*")):
        axes.plot(*places[node], mark, color="black", markersize=60 / side, zorder=4)
    axes.set_aspect("equal")
    axes.invert_yaxis()


def reachability(axes: Axes, task: CandidatesConfig, example: Answered) -> None:
    """Draw the graph downwards, black where the root leads, with the steps and a ring around the chosen candidate."""
    edges, asked = task.question_of(example.tokens)
    one, other, root = example.tokens[asked].tolist()
    places = _layers(edges.tolist())
    reached = ancestors(edges[:, ::-1], root)
    for colour, wanted in ((QUIET, False), ("black", True)):
        some = [(a, b) for a, b in edges.tolist() if (a in reached) is wanted]
        _lines(axes, some, places, color=colour, linewidth=0.7)
    if len(example.answer) > 1 and example.answer[-2] == BAR:
        steps = (np.concatenate(([root], tokens[:-2])) for tokens in (example.answer, example.predicted))
        _way(axes, places, Answered(example.number, example.tokens, *steps))
    _nodes(axes, places, {root: "#a6cee3", one: "#fdd08a", other: "#fdd08a"})
    chosen = int(example.predicted[-1])
    if chosen in places:
        colour = RIGHT if example.solved else WRONG
        axes.plot(*places[chosen], "o", markersize=16, color=colour, fillstyle="none", markeredgewidth=2)
    _list(axes, example)
    axes.margins(0.1)


def _layers(edges: list[list[int]]) -> dict[int, Place]:
    """Return the positions of a graph's nodes: below all parents, near them, evenly spaced in each layer.

    Nodes of a circle, and those below it, which only a file can have, share the last layer.
    """
    parents: dict[int, list[int]] = {node: [] for edge in edges for node in edge}
    for parent, child in edges:
        parents[child].append(parent)
    depth: dict[int, int] = {}
    while len(depth) < len(parents):
        known = len(depth)
        for node, its in parents.items():
            if node not in depth and all(parent in depth for parent in its):
                depth[node] = max((depth[parent] + 1 for parent in its), default=0)
        if len(depth) == known:
            last = max(depth.values(), default=-1) + 1
            depth |= dict.fromkeys(parents.keys() - depth.keys(), last)
    places: dict[int, Place] = {}
    for layer in range(max(depth.values()) + 1):
        nodes = [node for node in parents if depth[node] == layer]
        nodes.sort(key=lambda node: _middle([places[parent][0] for parent in parents[node] if parent in places]))
        places |= {node: ((index + 0.5) / len(nodes), -float(layer)) for index, node in enumerate(nodes)}
    return places


def _middle(places: list[float]) -> float:
    return sum(places) / max(1, len(places))


def _way(axes: Axes, places: Mapping[int, Place], example: Answered) -> None:
    """Draw the true path as a broad band, and from each of its nodes a line to the model's next node."""
    true, predicted = example.answer.tolist(), example.predicted.tolist()
    _lines(axes, list(pairwise(true)), places, color=TRUE, linewidth=7, solid_capstyle="round")
    for before, expected, node in zip([true[0], *true], true, predicted, strict=False):
        if node not in places:
            axes.plot(*places[expected], "x", color=WRONG, zorder=5)
            continue
        colour = RIGHT if node == expected else WRONG
        _lines(axes, [(before, node)], places, color=colour, linewidth=1.5, zorder=2 + (node != expected))
        if node != expected:
            axes.plot(*places[node], "o", markersize=13, color=WRONG, fillstyle="none", zorder=5)


def _lines(axes: Axes, edges: list[tuple[int, int]], places: Mapping[int, Place], **style: Any) -> None:
    for start, end in edges:
        axes.plot(*zip(places[start], places[end], strict=True), **{"linewidth": 1, "zorder": 1, **style})


def _nodes(axes: Axes, places: Mapping[int, Place], colours: Mapping[int, str]) -> None:
    for node, place in places.items():
        axes.plot(*place, "o", markersize=11, color=colours.get(node, "white"), markeredgecolor=QUIET, zorder=3)
        axes.text(*place, str(node), fontsize=6, ha="center", va="center", zorder=4)


def _list(axes: Axes, example: Answered) -> None:
    if len(example.answer) <= LISTED:
        true, predicted = (" ".join(map(str, tokens)) for tokens in (example.answer, example.predicted))
        axes.set_xlabel(f"true {true}\npredicted {predicted}", fontsize=7)


DRAW: dict[str, Callable[[Axes, Any, Answered], None]] = {
    "star_graph": star,
    "sudoku": sudoku,
    "maze": maze,
    "reachability": reachability,
    "prosqa": reachability,
}
_WAY = "The band is the true way; from each of its nodes a line leads to the next one by the model, red where wrong; "
_REACHED = (
    "Edges lead downwards, black where the root (blue) leads to; of the two candidates (orange) the one that the model "
    "ends at has a ring, green where the whole answer is right. Of an answer in steps, the band is the true way, and "
    "lines lead to the model's next steps, red where wrong. Numbers are token ids."
)
LEGENDS = {
    "star_graph": _WAY + "a cross: no node at all. The source is blue, the goal orange; numbers are token ids.",
    "sudoku": "What is given stands on grey; a digit is red where it is wrong.",
    "maze": _WAY + "a cross: no cell at all. From the dot to the star.",
    "reachability": _REACHED,
    "prosqa": _REACHED,
}
