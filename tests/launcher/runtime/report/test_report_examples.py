"""Pictures of examples in a report: they show what is in the tokens, and what the model of a real run answers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from plumbline.data.tasks.graphs import FIRST_NODE
from plumbline.data.tasks.maze import MazeConfig
from plumbline.data.tasks.reachability import ReachabilityConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.data.tasks.star_graph import StarGraphConfig
from plumbline.data.tasks.sudoku import SudokuConfig
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.report import examples, pictures
from plumbline.launcher.runtime.report.examples import answered, solved_and_failed
from plumbline.launcher.runtime.report.history import read_history
from plumbline.launcher.runtime.report.pictures import RIGHT, WRONG, Answered
from plumbline.launcher.runtime.scoring.scores import wilson_interval
from tests.launcher.runtime.report.pages import Page

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plumbline.data.tasks.kinds import AnyTaskConfig
    from tests.conftest import Command, Pretrain, Run

STAR = StarGraphConfig(path_length=2, nodes=9)
MAZE = "data.train=[{task: {name: maze, side: 3}}]"
THINKING = [
    "objective.name=latent_lookahead",
    "objective.horizon=1",
    "objective.anchors=2",
    "objective.anchor_policy=sequential",
]


def test_a_graph_with_a_circle_has_its_place_below_the_others() -> None:
    """A file may state one."""
    places = pictures._layers([[0, 1], [1, 2], [2, 3], [3, 2], [3, 4]])
    assert [places[node][1] for node in range(5)] == [0, -1, -2, -2, -2]


@pytest.fixture
def axes() -> Iterator[Axes]:
    figure, found = plt.subplots()
    yield found
    plt.close(figure)


def wrong_at(task: AnyTaskConfig, changes: Mapping[int, int], number: int = 0) -> Answered:
    """Return a held-out example answered rightly but for some tokens."""
    tokens, labels = task.example("validation", number)
    answer = labels[labels >= 0]
    predicted = answer.copy()
    for place, token in changes.items():
        predicted[place] = token
    return Answered(number, tokens, answer, predicted)


def points(axes: Axes, colour: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Marker and points of each line of a colour."""
    for line in axes.get_lines():
        if line.get_color() == colour:
            x, y = (np.asarray(values, float).tolist() for values in line.get_data())
            yield str(line.get_marker()), list(zip(x, y, strict=True))


def lines(axes: Axes, colour: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the ends of the lines of a colour."""
    return [(ends[0], ends[1]) for _, ends in points(axes, colour) if len(ends) == 2]


def marks(axes: Axes, colour: str) -> list[tuple[str, tuple[float, float]]]:
    """Return the markers of a colour and where they are."""
    return [(marker, places[0]) for marker, places in points(axes, colour) if len(places) == 1]


def named(axes: Axes) -> dict[int, tuple[float, float]]:
    """Return where the nodes are."""
    return {int(text.get_text()): text.get_position() for text in axes.texts}


def test_a_star_shows_its_edges_and_the_step_that_is_wrong(axes: Axes) -> None:
    task = StarGraphConfig(arms=3, path_length=3, nodes=12)
    graph = task.star_of(task.example("validation", 0).tokens)
    (other, *_) = (arm[0] for arm in graph.arms if arm[-1] != graph.goal)
    pictures.star(axes, task, wrong_at(task, {1: other, 2: 1}))
    places = named(axes)
    assert set(places) == {graph.source, *(node for arm in graph.arms for node in arm)}
    edges = {(places[graph.source], places[arm[0]]) for arm in graph.arms} | {
        (places[arm[0]], places[arm[1]]) for arm in graph.arms
    }
    assert set(lines(axes, pictures.QUIET)) == edges
    assert lines(axes, WRONG) == [(places[graph.source], places[other])]
    assert sorted(marks(axes, WRONG)) == [("o", places[other]), ("x", places[graph.goal])], "a bar is no node"
    assert len(lines(axes, RIGHT)) == 1, "the first token"


def test_two_arms_have_room_above_and_below(axes: Axes) -> None:
    """They lie on one line: what is as high as its content would have no height."""
    task = StarGraphConfig(path_length=4, nodes=12)
    pictures.star(axes, task, wrong_at(task, {}))
    assert axes.get_xlim() == axes.get_ylim() == (-3.5, 3.5)
    assert len({round(y, 9) for _, y in named(axes).values()}) == 1


def test_a_sudoku_shows_the_predicted_digits_in_the_colour_of_their_worth(axes: Axes) -> None:
    task = SudokuConfig()
    example = wrong_at(task, {})
    given = task.grid_of(example.tokens[:16]).ravel()
    blank = int(np.flatnonzero(given == 0)[0])
    token = 3 + (int(example.answer[blank]) - 2) % 4
    pictures.sudoku(axes, task, wrong_at(task, {blank: token}))
    assert len(axes.texts) == 16
    for text in axes.texts:
        x, y = text.get_position()
        cell = 4 * int(y) + int(x)
        expected = (
            (token - 2, WRONG) if cell == blank else (example.answer[cell] - 2, "black" if given[cell] else RIGHT)
        )
        assert (int(text.get_text()), text.get_color()) == expected
    assert len(axes.patches) == (given > 0).sum()
    assert axes.yaxis_inverted(), "the first row is the highest"


def test_a_maze_shows_its_walls_and_the_step_that_is_wrong(axes: Axes) -> None:
    task = MazeConfig(side=4)
    number = next(number for number in range(99) if len(wrong_at(task, {}, number).answer) > 4)
    way = (wrong_at(task, {}, number).answer - FIRST_NODE).tolist()
    far = next(cell for cell in range(16) if cell not in way)
    example = wrong_at(task, {2: FIRST_NODE + far}, number)
    pictures.maze(axes, task, example)

    def middle(cell: int) -> tuple[float, float]:
        return cell % 4 + 0.5, cell // 4 + 0.5

    assert lines(axes, WRONG) == [(middle(way[1]), middle(far))]
    steps = [(middle(before), middle(cell)) for before, cell in zip([way[0], *way], way, strict=False)]
    assert lines(axes, RIGHT) == [*steps[:2], *steps[3:]], "each from the true cell before"
    # A wall stands in the middle between its two cells, across the line from one to the other
    drawn = {tuple(np.add(start, end) / 2) for start, end in lines(axes, "black")}
    assert drawn == {tuple(np.add(middle(a), middle(b)) / 2) for a, b in task.walls_of(example.tokens)}
    for start, end in lines(axes, "black"):
        assert {abs(a - b) for a, b in zip(start, end, strict=True)} == {0, 1}
        along_x = start[1] == end[1]
        assert (start[1] % 1 == 0) if along_x else (start[0] % 1 == 0)
    assert sorted(marks(axes, "black")) == [("*", middle(way[-1])), ("o", middle(way[0]))]


@pytest.mark.parametrize("form", ["symbols", "words"])
def test_a_graph_shows_where_the_root_leads_and_which_candidate_is_chosen(axes: Axes, form: str) -> None:
    task = ReachabilityConfig.model_validate({"form": form})
    tokens = task.example("validation", 0).tokens
    edges, asked = task.question_of(tokens)
    right = int(wrong_at(task, {}).answer[0])
    (wrong,) = set(tokens[asked[:2]].tolist()) - {right}
    pictures.reachability(axes, task, wrong_at(task, {0: wrong}))
    places = named(axes)
    assert set(places) == set(edges.ravel().tolist())
    assert marks(axes, WRONG) == [("o", places[wrong])]
    assert not marks(axes, RIGHT)
    reached = {int(tokens[asked[2]])}
    for _ in edges:
        reached |= {child for parent, child in edges.tolist() if parent in reached}
    assert right in reached
    black = {(places[parent], places[child]) for parent, child in edges.tolist() if parent in reached}
    assert set(lines(axes, "black")) == black
    assert all(places[parent][1] > places[child][1] for parent, child in edges.tolist()), "downwards"
    pictures.reachability(axes, task, wrong_at(task, {}))
    assert marks(axes, RIGHT) == [("o", places[right])]


def test_an_answer_in_steps_shows_them_and_is_right_as_a_whole(axes: Axes) -> None:
    task = ReachabilityConfig(answer="chain")
    right = wrong_at(task, {})
    edges, asked = task.question_of(right.tokens)
    root, first = int(right.tokens[asked[2]]), int(right.answer[0])
    other = next(node for node in edges.ravel().tolist() if node not in (first, root))
    pictures.reachability(axes, task, wrong_at(task, {0: other}))
    places = named(axes)
    assert lines(axes, WRONG) == [(places[root], places[other])]
    assert ("o", places[int(right.answer[-1])]) in marks(axes, WRONG), "the end is right, the way to it is not"
    true = [root, *right.answer[:-2].tolist()]
    assert lines(axes, pictures.TRUE) == [(places[a], places[b]) for a, b in itertools.pairwise(true)]
    assert set(itertools.pairwise(true)) <= {(a, b) for a, b in edges.tolist()}


@pytest.fixture(scope="module")
def run(run_pretrain: Pretrain, tiny_config: Path) -> Run:
    """Train a thinker on stars, some of which it solves."""
    outcome = run_pretrain(
        tiny_config,
        "stars",
        [
            f"data.train=[{{task: {{name: star_graph, path_length: {STAR.path_length}, nodes: {STAR.nodes}}}}}]",
            *("data.sequence_length=16", "data.micro_batch_size=8", *THINKING),
            *("train.steps=20", "train.eval_interval=null", "train.eval_batches=32", "checkpoint.interval=null"),
        ],
    )
    assert outcome.code == 0, outcome.stderr
    return outcome.run


def test_the_report_of_a_task_shows_examples_and_counts_what_the_run_counted(
    run: Run, command: Command, tmp_path: Path
) -> None:
    output = tmp_path / "page.html"
    done = command("report", run.folder, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    share = json.loads((run.folder / "result.json").read_text())["eval/star_graph/thinking_exact_match"]
    assert 0 < share < 1, "or the test says little"
    text = output.read_text()
    assert f"Step 20: {round(256 * share)} of 256 held-out examples of star_graph are solved, with thoughts." in text
    shown = Page(text)
    assert shown.titles[-2:] == ["Examples", "Alerts"]
    assert {"Loss ahead", "Right answers", "star_graph: solved above, failed below"} <= set(shown.figures)
    low, high = wilson_interval(256 * share, 256)
    assert f">{share:.1%} [{low:.1%}, {high:.1%}]<" in text


def test_answers_are_those_that_exact_match_counts_without_thoughts_as_well(run: Run) -> None:
    model = load_model(run.folder, torch.device("cpu"))
    found = list(answered(model, TaskSource(STAR).held_out, 16))
    result = json.loads((run.folder / "result.json").read_text())
    assert [example.number for example in found] == list(range(0, 4096, 16))
    assert np.mean([example.solved for example in found]) == pytest.approx(result["eval/star_graph/exact_match"])
    right = np.mean([example.predicted == example.answer for example in found])
    assert right == pytest.approx(result["eval/star_graph/accuracy"])
    tokens, labels = STAR.example("validation", found[1].number)
    assert found[1].tokens.tolist() == tokens.tolist()
    assert found[1].answer.tolist() == labels[labels >= 0].tolist()


def complete(folder: Path, config: Path, *overrides: str) -> Path:
    """Make a run folder with a checkpoint in which there is nothing."""
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    save_config(load_config(config, list(overrides)), folder / "config.yaml")
    (folder / "result.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "loss": 3.0}\n')
    return folder


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(examples, "load_model", refuse)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.train=[{task: {name: addition}}]"],
        ["data.train=[{task: {name: maze}}, {path: x}]", "data.validation=[{path: y}]", "model.vocab_size=300"],
    ],
)
def test_nothing_is_loaded_for_text_or_a_task_without_pictures(
    overrides: list[str], tiny_config: Path, tmp_path: Path
) -> None:
    assert solved_and_failed(read_history(complete(tmp_path, tiny_config, *overrides))) is None


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("missing", ["result.json", "checkpoints"])
def test_a_run_that_goes_on_or_has_no_checkpoint_has_the_page_without(
    missing: str, tiny_config: Path, tmp_path: Path
) -> None:
    folder = complete(tmp_path / "run", tiny_config, MAZE)
    (folder / missing).rename(tmp_path / "elsewhere")
    assert solved_and_failed(read_history(folder)) is None


@pytest.mark.parametrize(
    "overrides",
    [
        [MAZE],
        ["data.train=[{path: x}]", "data.validation=[{path: y}, {task: {name: maze}}]", "model.vocab_size=300"],
    ],
)
def test_what_cannot_be_opened_is_a_warning(
    overrides: list[str], tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text ahead of the task is passed over."""
    folder = complete(tmp_path, tiny_config, *overrides)
    assert solved_and_failed(read_history(folder)) is None
    assert (
        f"warning: no pictures of examples: {folder}/checkpoints: holds no whole checkpoint" in capsys.readouterr().err
    )


@pytest.mark.parametrize("closed", ["config_in", "checkpoints"])
def test_what_another_user_has_closed_is_a_warning(
    closed: str, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    folder = complete(tmp_path, tiny_config, MAZE)
    monkeypatch.setattr(examples, closed, refused)
    assert solved_and_failed(read_history(folder)) is None
    assert f"warning: no pictures of examples: [Errno 13] Permission denied: '{folder}" in capsys.readouterr().err
