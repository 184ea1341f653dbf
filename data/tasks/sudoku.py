"""Generate Sudoku puzzles that have one solution, which is the answer.

    1 _ 3 _ _ _ 1 2 ... = [1 2 3 4 3 4 1 2 ...]        4 x 4, row by row: the puzzle, then the whole grid

Puzzles are made as in reasoning-gym: the cells of a random full grid are blanked one by one in random order, as long as
the solution stays unique. The answer is the whole grid, not only the blanks, so that each answer is at the same
distance from its cell. The authors of latent lookahead (arXiv 2603.20219) seem to ask for the whole grid as well: their
thoughts of 19 tokens fit the 16 cells of a 4 x 4 grid and 3 line ends, and exceed the 12 blanks that a puzzle can have.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field
from pydantic import model_validator as validator

from plumbline.data.indexed import Int64s
from plumbline.data.order import derive_key
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import ATTEMPTS, DrawnTaskConfig, Example, SplitName, answering

BLANK = 1
EQUALS = 2
FIRST_DIGIT = 3

MOST_BLANKS = {4: 12, 9: 54}
"""Most blanks at each size. No 4 x 4 puzzle can have more; in 9 x 9 grids, random blanking reaches 54 to 59 cells."""

RENAMINGS = 24
"""Renamings of one puzzle's digits to try before another puzzle is made."""


class SudokuConfig(DrawnTaskConfig):
    """Configure Sudoku with a unique solution. Token 1 is a blank, 2 is =, then the digits."""

    name: Literal["sudoku"] = "sudoku"
    """Which task."""
    size: Literal[4, 9] = 4
    """Cells along each side."""
    blanks: list[int] | None = Field(default=None, min_length=2, max_length=2)
    """Fewest and most blanks; null: 8 and 12 at size 4, 32 and 50 at size 9. Their number is drawn uniformly, and is
    lower if no other cell can be blanked."""

    @validator(mode="after")
    def _check(self) -> "SudokuConfig":
        fewest, most = self._blanks
        if not 1 <= fewest <= most <= MOST_BLANKS[self.size]:
            raise ValueError(
                f"blanks = [{fewest}, {most}]: give the fewest and the most, from 1 to {MOST_BLANKS[self.size]} for "
                f"size = {self.size}"
            )
        return self

    @property
    def _blanks(self) -> list[int]:
        return self.blanks or {4: [8, 12], 9: [32, 50]}[self.size]

    @property
    def _cells(self) -> int:
        return self.size**2

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: padding, blank, equals and digits."""
        return FIRST_DIGIT + self.size

    @property
    def longest(self) -> int:
        """Return the number of input tokens of every example; its last answer is not an input."""
        return 2 * self._cells

    def candidates(self, split: SplitName, number: int) -> Iterator[Example]:
        """Yield one puzzle with its digits renamed in several ways, then the next puzzle.

        Renaming digits is faster than drawing puzzles.
        """
        for attempt in range(ATTEMPTS):
            if attempt % RENAMINGS == 0:
                puzzle = self._puzzle(Draws(derive_key(self.name, self.seed, split, number, attempt)))
            draws = Draws(derive_key("digits", self.name, self.seed, split, number, attempt))
            renamed = np.concatenate((np.arange(FIRST_DIGIT), FIRST_DIGIT + draws.distinct(self.size, self.size)))
            yield self._answering(renamed[puzzle])

    def draw(self, draws: Draws) -> Example:
        """Draw one random example."""
        return self._answering(self._puzzle(draws))

    def _answering(self, sequence: Int64s) -> Example:
        return answering(sequence, np.arange(len(sequence)) > self._cells)

    def _puzzle(self, draws: Draws) -> Int64s:
        """Draw the tokens [2 size^2 + 1] of a puzzle, an equals sign and its solution."""
        fewest, most = self._blanks
        wanted = fewest + int(draws.integers(1, most - fewest + 1)[0])
        solution = full_grid(self.size, draws)
        puzzle = solution
        while puzzle.count(0) < fewest:
            puzzle = blanked(solution, self.size, draws.distinct(self._cells, self._cells).tolist(), wanted)
        tokens = [FIRST_DIGIT + digit.bit_length() - 1 if digit else BLANK for digit in (*puzzle, *solution)]
        return np.insert(np.array(tokens, np.int64), self._cells, EQUALS)

    def ask_otherwise(self, tokens: Int64s, draws: Draws) -> Int64s:
        """Rename the given digits consistently, each to a different one."""
        asked: Int64s = tokens.copy()
        given = np.flatnonzero(tokens[: self._cells] != BLANK)
        shift = 1 + draws.integers(1, self.size - 1)
        asked[given] = FIRST_DIGIT + (tokens[given] - FIRST_DIGIT + shift) % self.size
        return asked

    def grid_of(self, tokens: Int64s) -> Int64s:
        """Return the digits [size, size] of size^2 tokens of a puzzle or an answer; 0 for any other token."""
        digits = tokens - FIRST_DIGIT + 1
        grid: Int64s = np.where((digits > 0) & (digits <= self.size), digits, 0).reshape(self.size, self.size)
        return grid


# A digit is one bit of a number, a blank is 0, and a grid is a list of its cells, row by row.


@lru_cache
def units_of_cells(size: int) -> tuple[tuple[int, int, int], ...]:
    """Return the row, the column and the box of each cell, as consecutive numbers."""
    box = {4: 2, 9: 3}[size]
    cells = [divmod(cell, size) for cell in range(size**2)]
    return tuple((row, size + column, 2 * size + row // box * box + column // box) for row, column in cells)


@lru_cache
def cells_of_units(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the cells of each row, each column and each box."""
    units = units_of_cells(size)
    return tuple(tuple(cell for cell, its in enumerate(units) if unit in its) for unit in range(3 * size))


def used_digits(grid: Sequence[int], size: int) -> list[int]:
    """Return the digits used in each row, column and box, as bits."""
    used = [0] * (3 * size)
    for digit, (row, column, box) in zip(grid, units_of_cells(size), strict=True):
        used[row] |= digit
        used[column] |= digit
        used[box] |= digit
    return used


def fill(grid: list[int], size: int, digits: Sequence[Sequence[int]]) -> bool:
    """Fill the blanks of a grid in place, if possible, by depth-first search from the cell with the fewest choices.

    Args:
        grid: cells; left unchanged if there is no solution.
        size: of the grid.
        digits: for each cell, all digits in the order in which to try them.
    """
    units, every = units_of_cells(size), (1 << size) - 1
    used = used_digits(grid, size)
    blanks = [cell for cell, digit in enumerate(grid) if not digit]

    def search() -> bool:
        if not blanks:
            return True
        fewest, place, possible = size + 1, 0, 0
        for index, cell in enumerate(blanks):
            row, column, box = units[cell]
            free = every & ~(used[row] | used[column] | used[box])
            choices = free.bit_count()
            if choices < fewest:
                fewest, place, possible = choices, index, free
                if choices < 2:
                    break
        cell = blanks[place]
        blanks[place] = blanks[-1]
        blanks.pop()
        row, column, box = units[cell]
        for digit in digits[cell]:
            if digit & possible:
                grid[cell] = digit
                used[row] ^= digit
                used[column] ^= digit
                used[box] ^= digit
                if search():
                    return True
                used[row] ^= digit
                used[column] ^= digit
                used[box] ^= digit
        grid[cell] = 0
        blanks.append(cell)
        return False

    return search()


def full_grid(size: int, draws: Draws) -> list[int]:
    """Draw a random full grid."""
    order = np.argsort(np.reshape(draws.numbers(size**3), (size**2, size)), axis=1, kind="stable")
    grid = [0] * size**2
    fill(grid, size, (1 << order).tolist())
    return grid


def blanked(solution: Sequence[int], size: int, order: Sequence[int], wanted: int) -> list[int]:
    """Return a full grid with up to `wanted` cells blanked, tried in `order`, so that the solution stays unique."""
    grid = list(solution)
    for cell in order:
        if wanted == 0:
            break
        grid[cell] = 0
        if is_only_choice(grid, size, cell, solution[cell]):
            wanted -= 1
        else:
            grid[cell] = solution[cell]
    return grid


def is_only_choice(grid: Sequence[int], size: int, cell: int, digit: int) -> bool:
    """Return whether a blank cell has this digit in every solution."""
    units, members, used = units_of_cells(size), cells_of_units(size), used_digits(grid, size)
    row, column, box = units[cell]
    others = ((1 << size) - 1) & ~(used[row] | used[column] | used[box] | digit)
    if not others:
        return True
    for unit in units[cell]:  # usually no other cell of a unit can hold the digit, which saves the search
        rivals = (units[rival] for rival in members[unit] if rival != cell and not grid[rival])
        if all((used[row] | used[column] | used[box]) & digit for row, column, box in rivals):
            return True
    digits = [[1 << number for number in range(size)]] * size**2
    return not any(
        fill([*grid[:cell], other, *grid[cell + 1 :]], size, digits) for other in digits[cell] if other & others
    )
