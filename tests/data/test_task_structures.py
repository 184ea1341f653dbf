"""What the tokens of planning examples say, read back from them: stars, walls, grids and graphs."""

from itertools import pairwise

import numpy as np
import pytest

from plumbline.data.tasks.candidates import FIRST_NAME
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.graphs import BAR, EQUALS, FIRST_NODE, SLASH, asked_of
from plumbline.data.tasks.maze import MazeConfig
from plumbline.data.tasks.reachability import ReachabilityConfig
from plumbline.data.tasks.star_graph import Star, StarGraphConfig
from plumbline.data.tasks.sudoku import SudokuConfig


@pytest.mark.parametrize("edge_order", ["parent_first", "child_first"])
def test_a_star_is_read_from_its_source_outwards(edge_order: str) -> None:
    edges = [(12, 13), (9, 11), (9, 12), (11, 10)]
    words = [node for edge in edges for node in (*(edge if edge_order == "parent_first" else edge[::-1]), BAR)]
    tokens = np.array([*words[:-1], SLASH, 9, 10, EQUALS, 9, 11])
    task = StarGraphConfig.model_validate({"path_length": 3, "edge_order": edge_order})
    assert asked_of(tokens).tolist() == [9, 10]
    assert task.star_of(tokens) == Star(9, 10, [[11, 10], [12, 13]])


@pytest.mark.parametrize("target", ["forward", "reverse"])
def test_the_answer_to_a_star_is_the_arm_of_its_goal(target: str) -> None:
    task = StarGraphConfig.model_validate({"arms": 3, "path_length": 4, "nodes": 12, "target": target})
    for number in range(20):
        tokens, labels = task.example("validation", number)
        star = task.star_of(tokens)
        (way,) = ([star.source, *arm] for arm in star.arms if arm[-1] == star.goal)
        assert labels[labels >= 0].tolist() == (way if target == "forward" else way[::-1])


def test_walls_stand_where_a_maze_has_no_passage() -> None:
    # 0 1      0-1, 0-2 and 2-3 are open, so the one wall is between 1 and 3
    # 2 3
    cells = np.array([1, 0, 0, 2, 3, 2]) + FIRST_NODE
    tokens = np.array([*cells[:2], BAR, *cells[2:4], BAR, *cells[4:], SLASH, cells[0], cells[4], EQUALS])
    assert MazeConfig(side=2).walls_of(tokens) == [(1, 3)]
    task = MazeConfig(side=5)
    for number in range(10):
        tokens, labels = task.example("validation", number)
        walls = task.walls_of(tokens)
        assert len(set(walls)) == 2 * 5 * 4 - 24, "all neighbours but the passages of a tree"
        way = (labels[labels >= 0] - FIRST_NODE).tolist()
        assert not {(min(step), max(step)) for step in pairwise(way)} & set(walls)


def test_a_grid_has_the_digits_of_its_tokens_and_none_elsewhere() -> None:
    task = SudokuConfig()
    tokens = np.array([3, 1, 2, 6, 0, 7, 4, 5, *[1] * 8])
    assert task.grid_of(tokens).tolist() == [[1, 0, 0, 4], [0, 0, 2, 3], [0] * 4, [0] * 4]
    tokens, labels = task.example("validation", 0)
    given, solution = task.grid_of(tokens[:16]), task.grid_of(labels[labels >= 0])
    assert (given[given > 0] == solution[given > 0]).all()
    assert np.sort(solution, axis=1).tolist() == [[1, 2, 3, 4]] * 4


def test_a_graph_is_the_same_in_symbols_and_in_words() -> None:
    for number in range(10):
        found = []
        for form, first in (("symbols", FIRST_NODE), ("words", FIRST_NAME)):
            task = ReachabilityConfig.model_validate({"form": form})
            tokens, labels = task.draw(Draws(number))
            edges, places = task.question_of(tokens)
            assert labels[-1] in tokens[places[:2]], "a candidate"
            found.append((edges - first, tokens[places] - first))
        (edges, asked), (again, in_words) = found
        assert edges.tolist() == again.tolist()
        assert asked.tolist() == in_words.tolist()
        assert asked[2] in edges[:, 0], "the root is the last of the three"
        assert not np.isin(asked[2], edges[:, 1])
