"""Planning tasks: solutions are recomputed from the tokens alone, and nothing but the question tells the answer."""

from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from pydantic import ValidationError

from plumbline.data.config import SourceConfig
from plumbline.data.tasks.kinds import AnyTaskConfig
from plumbline.data.tasks.maze import MazeConfig
from plumbline.data.tasks.reachability import ReachabilityConfig
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.data.tasks.sudoku import SudokuConfig
from plumbline.data.tasks.task import Example, SplitName

Edges = list[tuple[int, int]]

STARS = [
    StarGraphConfig(),
    StarGraphConfig(arms=3, path_length=4, nodes=10, edge_order="child_first"),
    StarGraphConfig(arms=4, path_length=2, nodes=9, target="reverse"),
    StarGraphConfig(arms=2, path_length=4, nodes=12, edge_order="child_first", target="reverse"),
]
REACHABILITY = [
    ReachabilityConfig(),
    ReachabilityConfig(answer="chain"),
    ReachabilityConfig(form="words"),
    ReachabilityConfig(form="words", answer="chain"),
]
WORDS = {1: "Every", 2: "is", 3: "a", 4: ".", 5: "Is", 6: "or", 7: "?"}


def examples(task: AnyTaskConfig, train: int, validation: int = 0) -> Iterator[Example]:
    counts: dict[SplitName, int] = {"train": train, "validation": validation}
    for split, count in counts.items():
        for number in range(count):
            yield task.example(split, number)


def answered(example: Example) -> tuple[list[int], list[int]]:
    """Return what is read before the answer, and the answer, which is read as it is given."""
    tokens, labels = example.tokens.tolist(), example.labels.tolist()
    start = next(place for place, label in enumerate(labels) if label != -100)
    prompt, answer = tokens[: start + 1], labels[start:]
    assert tokens == [*prompt, *answer[:-1]]
    assert labels == [-100] * start + answer
    assert min(answer) > 0
    return prompt, answer


def graph_of(prompt: list[int]) -> tuple[Edges, list[int]]:
    """Return the edges and what is asked, of `a b | c d / x y =`."""
    text = " ".join({1: "|", 2: "/", 3: "="}.get(token) or str(token) for token in prompt)
    listed, question = text.removesuffix(" =").split(" / ")
    edges = [tuple(map(int, edge.split(" "))) for edge in listed.split(" | ")]
    assert all(len(edge) == 2 for edge in edges)
    return edges, [int(node) for node in question.split(" ")]  # type: ignore[return-value]


def distances(edges: Edges, start: int) -> dict[int, int]:
    found, border = {start: 0}, {start}
    while border:
        border = {child for parent, child in edges if parent in border} - found.keys()
        found |= dict.fromkeys(border, max(found.values()) + 1)
    return found


def star_of(task: StarGraphConfig, prompt: list[int]) -> tuple[Edges, int, int]:
    edges, (source, goal) = graph_of(prompt)
    return [edge if task.edge_order == "parent_first" else edge[::-1] for edge in edges], source, goal


@pytest.mark.parametrize("task", STARS)
def test_a_star_has_arms_of_one_length_and_the_answer_walks_along_the_right_one(task: StarGraphConfig) -> None:
    for example in examples(task, 60, 10):
        prompt, answer = answered(example)
        assert len(prompt) == 3 * task.arms * (task.path_length - 1) + 3
        edges, source, goal = star_of(task, prompt)
        assert len(edges) == task.arms * (task.path_length - 1)
        assert Counter(parent for parent, _ in edges)[source] == task.arms
        assert max(Counter(child for _, child in edges).values()) == 1
        far = distances(edges, source)
        assert Counter(far.values()) == {0: 1} | dict.fromkeys(range(1, task.path_length), task.arms)
        path = answer if task.target == "forward" else answer[::-1]
        assert (path[0], path[-1], len(path)) == (source, goal, task.path_length)
        assert far[goal] == task.path_length - 1
        assert set(pairwise(path)) <= set(edges)


@pytest.mark.parametrize("task", STARS[:2])
def test_nothing_in_a_star_but_its_goal_tells_the_right_arm(task: StarGraphConfig) -> None:
    """The first step ranks among its siblings, by label and by place of its edge, as evenly as if drawn by lot."""
    count = 1200
    by_label, by_place, by_last_edge = Counter[int](), Counter[int](), Counter[int]()
    for example in examples(task, count):
        prompt, answer = answered(example)
        edges, source, goal = star_of(task, prompt)
        first_steps = [child for parent, child in edges if parent == source]
        by_place[first_steps.index(answer[1])] += 1
        by_label[sorted(first_steps).index(answer[1])] += 1
        ends = [child for _, child in edges if child not in {parent for parent, _ in edges}]
        by_last_edge[ends.index(goal)] += 1
    for ranks in (by_label, by_place, by_last_edge):
        assert set(ranks) == set(range(task.arms))
        deviation = (count * (task.arms - 1)) ** 0.5 / task.arms
        assert all(abs(hits - count / task.arms) < 4 * deviation for hits in ranks.values())


@pytest.mark.parametrize("side", [2, 5, 7])
def test_a_maze_is_a_tree_on_the_lattice_and_the_answer_is_the_way_through_it(side: int) -> None:
    dead_ends = []
    for example in examples(MazeConfig(side=side), 40, 5):
        prompt, path = answered(example)
        edges, (origin, target) = graph_of(prompt)
        assert len(edges) == side**2 - 1
        for cells in edges:
            (row, column), (other_row, other_column) = (divmod(cell - 4, side) for cell in cells)
            assert abs(row - other_row) + abs(column - other_column) == 1
        both = [*edges, *(edge[::-1] for edge in edges)]
        assert distances(both, origin).keys() == set(range(4, 4 + side**2)), "connected, and so a tree"
        assert origin != target
        assert (path[0], path[-1], len(path)) == (origin, target, len(set(path)))
        assert set(pairwise(path)) <= set(both)
        dead_ends.append(sum(degree == 1 for degree in Counter(cell for cell, _ in both).values()) / side**2)
    if side == 7:
        assert 0.08 < mean(dead_ends) < 0.16, "corridors are long, as depth-first search carves them"


def test_mazes_begin_and_turn_anywhere() -> None:
    drawn = [graph_of(answered(example)[0]) for example in examples(MazeConfig(side=3), 600)]
    assert {node for _, asked in drawn for node in asked} == set(range(4, 13))
    upwards = mean(first < second for edges, _ in drawn for first, second in edges)
    assert abs(upwards - 0.5) < 4 * 0.5 / (600 * 8) ** 0.5
    first_cells = Counter(edges[0][0] for edges, _ in drawn)
    assert len(first_cells) == 9


def completions(grid: list[int], size: int, most: int) -> list[list[int]]:
    """Up to `most` ways to fill the zeros with 1 to size, by plain search."""
    box = round(size**0.5)
    peers = [
        {
            other
            for other in range(size**2)
            if other // size == cell // size
            or other % size == cell % size
            or (other // size // box, other % size // box) == (cell // size // box, cell % size // box)
        }
        for cell in range(size**2)
    ]

    def search(grid: list[int]) -> Iterator[list[int]]:
        blanks = [cell for cell, digit in enumerate(grid) if digit == 0]
        if not blanks:
            yield grid
            return
        choices = {cell: set(range(1, size + 1)) - {grid[peer] for peer in peers[cell]} for cell in blanks}
        cell = min(choices, key=lambda cell: len(choices[cell]))
        for digit in choices[cell]:
            yield from search([*grid[:cell], digit, *grid[cell + 1 :]])

    return [filled for filled, _ in zip(search(grid), range(most), strict=False)]


SUDOKUS = [
    (SudokuConfig(), 150),
    (SudokuConfig(blanks=[12, 12]), 20),
    (SudokuConfig(size=9), 4),
    (SudokuConfig(size=9, blanks=[54, 54]), 1),
]


@pytest.mark.parametrize(("task", "count"), SUDOKUS)
def test_a_sudoku_has_the_one_solution_that_is_asked_for(task: SudokuConfig, count: int) -> None:
    cells, blanks = task.size**2, Counter[int]()
    for example in examples(task, count, count):
        prompt, answer = answered(example)
        assert prompt[cells:] == [2]
        grid = [0 if token == 1 else token - 2 for token in prompt[:cells]]
        assert completions(grid, task.size, 2) == [[token - 2 for token in answer]]
        blanks[grid.count(0)] += 1
    fewest, most = task.blanks or {4: (8, 12), 9: (32, 50)}[task.size]
    assert fewest <= min(blanks) <= max(blanks) <= most
    if count == 150:
        assert min(blanks[number] for number in range(8, 12)) > 35, "evenly many, but for the most"


def test_every_grid_of_four_is_drawn() -> None:
    assert len(completions([0] * 16, 4, 999)) == 288
    drawn = Counter(tuple(answered(example)[1]) for example in examples(SudokuConfig(), 3000))
    assert len(drawn) == 288
    assert max(drawn.values()) < 60  # about 10 each


def reachability_of(task: ReachabilityConfig, prompt: list[int]) -> tuple[Edges, list[int], int]:
    """Return the edges, the two candidates and the root."""
    if task.form == "symbols":
        edges, (*candidates, root) = graph_of(prompt)
        return edges, candidates, root
    *statements, question = " ".join(WORDS.get(token) or str(token) for token in prompt).split(" . ")
    is_, asked, a, one, or_, other, mark = question.split(" ")
    assert (is_, a, or_, mark) == ("Is", "a", "or", "?")
    edges = [sentence_of(statement) for statement in statements]
    children = {child for _, child in edges}
    for (parent, _), statement in zip(edges, statements, strict=True):
        assert statement.startswith("Every ") == (parent in children), "a node without parents has a name of its own"
    return edges, [int(one), int(other)], int(asked)


def sentence_of(text: str) -> tuple[int, int]:
    parent, child = text.removeprefix("Every ").split(" is a ")
    return int(parent), int(child)


def chain_of(task: ReachabilityConfig, answer: list[int], root: int) -> list[int]:
    """Return the path that is answered, from the root on."""
    if task.form == "symbols":
        assert answer[-2] == 1
        return [root, *answer[:-2]]
    text = " ".join(WORDS.get(token) or str(token) for token in answer[:-1])
    sentences = text.removesuffix(" .").split(" . ")
    assert [sentence.startswith("Every ") for sentence in sentences] == [False] + [True] * (len(sentences) - 1)
    steps = [sentence_of(sentence) for sentence in sentences]
    assert all(before[1] == after[0] for before, after in pairwise(steps))
    return [steps[0][0], *(child for _, child in steps)]


def shortest_paths(edges: Edges, start: int, end: int) -> list[list[int]]:
    far, paths = distances(edges, start), [[start]]
    for steps in range(1, far[end] + 1):
        paths = [
            [*path, child] for path in paths for parent, child in edges if parent == path[-1] and far[child] == steps
        ]
    return [path for path in paths if path[-1] == end]


@pytest.mark.parametrize("task", REACHABILITY)
def test_the_answer_is_reached_from_the_root_and_the_other_candidate_is_not(task: ReachabilityConfig) -> None:
    for example in examples(task, 60, 5):
        prompt, answer = answered(example)
        edges, candidates, root = reachability_of(task, prompt)
        assert len(set(edges)) == len(edges) <= 2 * task.nodes
        assert root not in {child for _, child in edges}
        assert not set(candidates) & {parent for parent, _ in edges}, "both are leaves"
        far = distances(edges, root)
        assert [node in far for node in candidates].count(True) == 1
        assert answer[-1] in far
        assert answer[-1] in candidates
        if task.answer == "chain":
            assert chain_of(task, answer, root) == min(shortest_paths(edges, root, answer[-1]))
        else:
            assert len(answer) == 1


def test_reachability_has_the_statistics_of_prosqa() -> None:
    """Compare with the 800 problems of its validation and test parts.

    They have 22.8 nodes, 36.0 edges, a shortest path of 3.77 (3 steps: 41 %, 4: 44 %, 5: 13 %, 6: 2 %), 1.59 shortest
    paths, 2.5 parentless nodes, a root with 2.96 children that leads to 13.4 nodes, itself among them.
    """
    nodes, edge_counts, steps, paths, tops, children, reached = [], [], [], [], [], [], []
    for example in examples(ReachabilityConfig(), 800):
        prompt, answer = answered(example)
        edges, _, root = reachability_of(ReachabilityConfig(), prompt)
        nodes.append(len({node for edge in edges for node in edge}))
        edge_counts.append(len(edges))
        found = shortest_paths(edges, root, answer[0])
        steps.append(len(found[0]) - 1)
        paths.append(len(found))
        tops.append(len({parent for parent, _ in edges} - {child for _, child in edges}))
        children.append(sum(parent == root for parent, _ in edges))
        reached.append(len(distances(edges, root)))
    assert mean(nodes) == pytest.approx(22.8, abs=0.3)
    assert mean(edge_counts) == pytest.approx(36.0, abs=0.6)
    assert mean(steps) == pytest.approx(3.77, abs=0.06)
    assert mean(paths) == pytest.approx(1.59, abs=0.12)
    assert mean(tops) == pytest.approx(2.5, abs=0.15)
    assert mean(children) == pytest.approx(2.96, abs=0.15)
    assert mean(reached) == pytest.approx(13.4, abs=0.5)
    shares = [steps.count(number) / len(steps) for number in (3, 4, 5, 6)]
    assert min(steps) >= 3
    assert max(steps) <= 6
    assert shares == pytest.approx([0.41, 0.44, 0.13, 0.02], abs=0.04)


Guess = Callable[[Edges, list[int]], int]


def deepest(edges: Edges, candidates: list[int]) -> int:
    """Return the candidate that is further from the furthest of the parentless nodes that lead to it."""
    tops = {parent for parent, _ in edges} - {child for _, child in edges}
    return max(candidates, key=lambda node: max(distances(edges, top).get(node, 0) for top in tops))


GUESSES: dict[str, Guess] = {
    "the first candidate": lambda _, candidates: candidates[0],
    "the lower name": lambda _, candidates: min(candidates),
    "the one with more parents": lambda edges, candidates: max(candidates, key=[c for _, c in edges].count),
    "the one read first": lambda edges, candidates: min(candidates, key=[c for _, c in edges].index),
    "the deeper one": deepest,
}


@pytest.mark.parametrize("task", [REACHABILITY[0], REACHABILITY[2]])
def test_no_guess_that_leaves_the_root_out_is_better_than_chance(task: ReachabilityConfig) -> None:
    count = 800
    right = Counter[str]()
    for example in examples(task, count):
        prompt, answer = answered(example)
        edges, candidates, _ = reachability_of(task, prompt)
        right.update(name for name, guess in GUESSES.items() if guess(edges, candidates) == answer[-1])
    for name in GUESSES:
        assert abs(right[name] / count - 0.5) < 4 * 0.5 / count**0.5, name


@pytest.mark.parametrize("task", [*STARS[:2], *REACHABILITY, MazeConfig(side=4), SudokuConfig()])
def test_another_question_about_the_same_things_has_another_answer(task: AnyTaskConfig) -> None:
    """The labels stay, so that a model which reads the question is wrong."""
    for number in range(30):
        example, other = task.example("validation", number), task.with_another_question("validation", number)
        prompt, answer = answered(example)
        asked, stays = answered(other)
        assert stays == answer
        if isinstance(task, SudokuConfig):
            assert all((one == 1) == (another == 1) for one, another in zip(prompt, asked, strict=True))
            given = [place for place in range(16) if prompt[place] != 1]
            names = {(prompt[place], asked[place]) for place in given}
            assert len(names) == len({one for one, _ in names}) == len({another for _, another in names})
            assert all(one != another for one, another in names)
            continue
        assert sum(one != another for one, another in zip(prompt, asked, strict=True)) == 1
        if isinstance(task, ReachabilityConfig):
            edges, candidates, root = reachability_of(task, asked)
            (wrong,) = set(candidates) - {answer[-1]}
            assert wrong in distances(edges, root)
            assert answer[-1] not in distances(edges, root)
            assert root not in {child for _, child in edges}
            assert edges == reachability_of(task, prompt)[0]
        else:
            edges, (source, goal) = graph_of(asked)
            assert (edges, source) == (graph_of(prompt)[0], graph_of(prompt)[1][0])
            assert goal not in {source, graph_of(prompt)[1][1]}
            if isinstance(task, StarGraphConfig):
                edges, source, goal = star_of(task, asked)
                assert distances(edges, source)[goal] == task.path_length - 1


GOLDEN: list[tuple[AnyTaskConfig, str]] = [
    (STARS[0], "58762490a30372dc"),
    (STARS[3], "6b3c2c526db96f42"),
    (SudokuConfig(), "b26978c5b214c382"),
    (SudokuConfig(size=9), "0f1bd9c85d0fa694"),
    (MazeConfig(), "b1dcf638d4121cc6"),
    (REACHABILITY[0], "3cf03183c382d6a9"),
    (REACHABILITY[3], "2fdc31167c96d032"),
]


@pytest.mark.parametrize(("task", "golden"), GOLDEN)
def test_planning_examples_stay_what_they_are(task: AnyTaskConfig, golden: str) -> None:
    """A change here is a change of the task: a resumed run would read other samples without a word."""
    drawn = [task.example("train", 0), task.example("train", 10**12), task.example("validation", 7)]
    drawn.append(task.with_another_question("validation", 7))
    found = blake2b(repr([[tokens.tolist(), labels.tolist()] for tokens, labels in drawn]).encode(), digest_size=8)
    assert found.hexdigest() == golden


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"name": "star_graph", "arms": 3, "path_length": 4, "nodes": 9},
            r"nodes = 9 labels are too few .* 10 or more",
        ),
        ({"name": "star_graph", "arms": 1}, r"star_graph\.arms"),
        ({"name": "star_graph", "edge_order": "random"}, r"'parent_first' or 'child_first'"),
        ({"name": "sudoku", "size": 6}, r"sudoku\.size"),
        ({"name": "sudoku", "blanks": [8, 13]}, r"blanks = \[8, 13\]: .* from 1 to 12 for size = 4"),
        ({"name": "sudoku", "size": 9, "blanks": [50, 32]}, r"blanks = \[50, 32\]: .* from 1 to 54 for size = 9"),
        ({"name": "sudoku", "blanks": [8]}, r"sudoku\.blanks"),
        ({"name": "maze", "side": 1}, r"maze\.side"),
        ({"name": "reachability", "nodes": 11}, r"reachability\.nodes"),
        ({"name": "reachability", "form": "prose"}, r"'symbols' or 'words'"),
        ({"name": "reachability", "examples": 0}, r"reachability\.examples"),
    ],
)
def test_keys_that_make_no_sense_are_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate({"task": task})
