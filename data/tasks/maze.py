"""Generate mazes: the path from one cell of a lattice to another.

    a b | c b | d c / a d = [a b c d]

The mazes are perfect, with exactly one path between any two cells, and are carved by depth-first search as in
maze-dataset (arXiv 2309.10498), which makes long corridors with few forks. Each cell is one token.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field

from plumbline.data.indexed import Int64s
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.graphs import FIRST_NODE, edges_of, prompt_length, spell
from plumbline.data.tasks.task import DrawnTaskConfig, Example


class MazeConfig(DrawnTaskConfig):
    """Configure path finding in a maze. Token 1 is |, 2 is /, 3 is =, then the cells, row by row.

    Each pair of neighbouring cells without a wall between them is an edge; edges come in random order. Origin and
    target are any two different cells.
    """

    name: Literal["maze"] = "maze"
    """Which task."""
    side: int = Field(default=7, ge=2)
    """Cells along each side of the square."""

    @property
    def _cells(self) -> int:
        return self.side**2

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, three signs and cells."""
        return FIRST_NODE + self._cells

    @property
    def longest(self) -> int:
        """Return the number of input tokens of a maze whose path visits every cell; the last answer is not an input."""
        return prompt_length(self._cells - 1, 2) + self._cells - 1

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        entered_from = carve(self.side, draws.numbers(self._cells))
        edges = np.array([(cell, before) for cell, before in entered_from.items() if before >= 0], np.int64)
        turned = draws.integers(len(edges), 2) == 1
        edges[turned] = edges[turned, ::-1]
        edges = edges[draws.distinct(len(edges), len(edges))]
        origin, target = draws.distinct(2, self._cells).tolist()
        return spell(edges, (origin, target), FIRST_NODE + np.array(way(entered_from, origin, target), np.int64))

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Make another cell the target."""
        asked: Int64s = tokens.copy()
        target = prompt_length(self._cells - 1, 2) - 2
        others = np.setdiff1d(FIRST_NODE + np.arange(self._cells), tokens[target - 1 : target + 1])
        asked[target] = others[draws.integers(1, len(others))[0]]
        return asked

    def walls_of(self, tokens: Int64s) -> list[tuple[int, int]]:
        """Return the pairs of neighbouring cells, numbered from 0, with a wall between them in an example."""
        passages = {(min(pair), max(pair)) for pair in (edges_of(tokens) - FIRST_NODE).tolist()}
        pairs = ((cell, other) for cell, others in enumerate(lattice(self.side)) for other in others if cell < other)
        return [pair for pair in pairs if pair not in passages]


def carve(side: int, numbers: list[int]) -> dict[int, int]:
    """Map each cell of a random maze to the cell from which it was entered, or -1 for the first.

    Args:
        side: cells along each side.
        numbers: a random number for each cell.
    """
    neighbours = lattice(side)
    first, *rest = numbers
    trail = [first % side**2]
    entered_from = {trail[0]: -1}
    for number in rest:
        while not (fresh := [cell for cell in neighbours[trail[-1]] if cell not in entered_from]):
            trail.pop()
        cell = fresh[number % len(fresh)]
        entered_from[cell] = trail[-1]
        trail.append(cell)
    return entered_from


@lru_cache
def lattice(side: int) -> tuple[tuple[int, ...], ...]:
    """Return the two to four neighbours of each cell."""
    cells = [divmod(cell, side) for cell in range(side**2)]
    return tuple(
        tuple(other for other, (y, x) in enumerate(cells) if abs(y - row) + abs(x - column) == 1)
        for row, column in cells
    )


def way(entered_from: dict[int, int], origin: int, target: int) -> list[int]:
    """Return the cells from origin to target, both included.

    The path goes up to where their paths to the first cell meet, and then down.
    """
    up, down = [origin], [target]
    while up[-1] >= 0:
        up.append(entered_from[up[-1]])
    while down[-1] not in up:
        down.append(entered_from[down[-1]])
    return [*up[: up.index(down[-1])], *reversed(down)]
