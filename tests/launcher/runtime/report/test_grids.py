"""Pages of sweeps and of grids of models and recipes, and the figures that all pages share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.launcher import report
from plumbline.launcher.runtime.quantize.damage import Damage
from plumbline.launcher.runtime.quantize.facts import CheckpointFacts
from plumbline.launcher.runtime.quantize.row import PostBits, Rounding, Row, TextSettings
from plumbline.launcher.runtime.report import figures, quantization
from plumbline.launcher.runtime.report.figures import short, smooth
from plumbline.launcher.runtime.sweep import page as sweep_page
from plumbline.launcher.runtime.sweep.axis_plot import by_axis
from plumbline.launcher.runtime.sweep.grid import summarize
from plumbline.launcher.runtime.sweep.names import write_names
from plumbline.launcher.runtime.sweep.result import Result, RunOutcome
from plumbline.launcher.runtime.system.files import write_json_lines
from tests.launcher.runtime.report.pages import Page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conftest import Command


def cell(folder: Path, lr: float, shape: str, seed: int, outcome: RunOutcome) -> Result:
    name = f"{lr}-{shape}-{seed}"
    return Result(
        {"optimizer.lr": lr, "shape": shape}, seed, name, str(folder / "runs" / name),
        64, 2, 64, 2, 1000, 16, 16, 16, None, lr, outcome,
    )  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write the folder of a sweep of two axes and two seeds, of which one run failed."""
    folder = tmp_path / "rates"
    results = []
    for lr in (0.001, 0.01, 0.1):
        for shape in ("deep", "<wide>"):
            for seed in (1, 2):
                loss = 2 + lr + (shape == "deep") + 0.01 * seed
                results.append(
                    cell(folder, lr, shape, seed, RunOutcome("finished", loss=loss, tokens=400, seconds=1.5))
                )
    results[-1] = cell(folder, 0.1, "<wide>", 2, RunOutcome("failed"))
    for result in results:
        Path(result.run).mkdir(parents=True)
        (Path(result.run) / "metrics.jsonl").write_text('{"step": 1, "tokens": 100, "loss": 3.0}\n')
    (Path(results[-1].run) / "error.txt").write_text("no space <left>\nTraceback\n")
    write_json_lines(folder / "results.jsonl", (result.to_json() for result in results))
    (folder / "summary.json").write_text('{"name": "rates", "kind": "lr_transfer"}')
    (folder / "summary.txt").write_text("it moved by 0.1\n")
    (folder / "summary.png").write_bytes(figures.lines([]))
    return folder


def test_a_sweep_becomes_a_page(sweep: Path, command: Command) -> None:
    done = command("report", sweep, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["runs"] == {"finished": 11, "failed": 1}
    assert document["points"][0]["labels"] == {"optimizer.lr": 0.001, "shape": "<wide>"}
    text = (sweep / "report.html").read_text()
    shown = Page(text)
    assert not shown.outside
    assert shown.titles == ["Sweep", "Points", "Loss over each axis", "Curves", "Failed runs"]
    assert shown.figures == ["optimizer.lr", "shape", "Training loss"]
    assert shown.facts["optimizer.lr"] == "0.001, 0.01, 0.1"
    assert shown.facts["seeds"] == "1, 2"
    assert shown.facts["duration"] == "0:16 of steps, over all runs"
    assert "2.0160 ± 0.0050" in text
    assert "it moved by 0.1" in text
    assert "no space &lt;left&gt;" in text
    assert len(shown.images) == 4, "with the picture of its kind"


def test_a_sweep_without_runs_here_is_a_page_of_its_rows(sweep: Path) -> None:
    rows = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    write_json_lines(sweep / "results.jsonl", ({**row, "run": "/gone"} for row in rows))
    for name in ("summary.json", "summary.txt", "summary.png"):
        (sweep / name).unlink()
    shown = Page(sweep_page.make(sweep)[0])
    assert shown.titles == ["Sweep", "Points", "Loss over each axis", "Failed runs"]
    assert shown.facts["kind"] == "unknown"


def test_a_sweep_that_has_no_results_yet_says_how_to_write_them(tmp_path: Path) -> None:
    write_names(tmp_path / "rates", [("a", "optimizer.lr=0.1 seed=1")])
    with pytest.raises(ValueError, match=r"rates: a sweep without results\.jsonl, .* --summarize` writes"):
        report.make_page([tmp_path / "rates"], "tokens")


def test_a_damaged_row_of_a_sweep_is_named(sweep: Path) -> None:
    with (sweep / "results.jsonl").open("ab") as file:
        file.write(b'{"labels": {}}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 13: not a row of a sweep's results\.jsonl"):
        sweep_page.make(sweep)
    (sweep / "summary.json").write_text("[")
    (sweep / "results.jsonl").write_text("".join((sweep / "results.jsonl").read_text().splitlines(True)[:12]))
    with pytest.raises(ValueError, match=r"summary\.json: cannot be read"):
        sweep_page.make(sweep)


def test_axes_of_one_value_and_points_without_a_loss_have_no_figure(tmp_path: Path) -> None:
    finished = [cell(tmp_path, lr, "one", 1, RunOutcome("finished", loss=lr)) for lr in (1.0, 2.0)]
    pending = [cell(tmp_path, 1.0, "two", 1, RunOutcome())]
    assert [figure.title for figure in by_axis(summarize(None, [*finished, *pending]).points)] == ["optimizer.lr"]


def row(model: str, recipe: str, delta: float, **changes: Any) -> Row:
    values: dict[str, Any] = {"bits": 4, "activation": None, "kurtosis": 3.0, "tokens": 1000.0, "base": 2.0}
    values |= {"stored": 4.25, **changes}
    return Row(
        key=f"{model}{recipe}",
        checkpoint=CheckpointFacts(model, model, None, 1, 10, int(values["tokens"]), values["tokens"] / 10),
        text=TextSettings("corpora/a", "f", 32, 8, None, 4),
        recipe=recipe,
        post={},
        bits=PostBits(values["bits"], values["activation"], None),
        damage=Damage(
            values["base"], values["base"] + delta, delta, (delta - 0.01, delta + 0.01), 7.4, None, 0.1, 0.9, 100, 4
        ),
        rounding=Rounding(values["stored"], 1.0, 20.0, 2.0, 3.0, values["kurtosis"], 4.0),
        noise_floor=0.001,
    )


def write_rows(folder: Path, rows: Iterable[Row]) -> Path:
    folder.mkdir(exist_ok=True)
    write_json_lines(folder / "rows.jsonl", (each.to_json() for each in rows))
    return folder


def test_models_and_recipes_become_a_grid(tmp_path: Path, command: Command) -> None:
    rows = [
        *(row("runs/a/step_1", f"rtn-w{bits}", 0.5 / bits, bits=bits) for bits in (3, 4, 8)),
        *(
            row("runs/b/step_1", f"rtn-w{bits}", 0.2 / bits, bits=bits, tokens=9000.0, stored=bits + 0.5)
            for bits in (3, 4)
        ),
        *(row("runs/b/step_1", f"w8a8-{k}", 0.01 * k, activation=8, kurtosis=2.0 + k) for k in (0, 1, 2)),
        row("runs/a/step_1", "<w2>", math.nan),
    ]
    rows += [row(f"runs/{k}/step_1", "w4a8", k, activation=8, kurtosis=2.0 + k, base=2.0 + k) for k in (1, 2, 3)]
    folder = write_rows(tmp_path / "grid", rows)
    before = (folder / "rows.jsonl").read_bytes()
    done = command("report", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == len(rows)
    assert (folder / "rows.jsonl").read_bytes() == before
    text = (folder / "report.html").read_text()
    shown = Page(text)
    assert not shown.outside
    assert shown.titles == [
        "Models",
        "Models and recipes",
        "Curves",
        "Intervals",
        *(f"{run}/step_1" for run in "ab123"),
    ]
    assert {"Loss added over bits", "Loss added over training", "Loss added over kurtosis"} <= set(shown.figures)
    assert "w4a8: Spearman +1.00 over 3 models<" in text
    assert "9,000 tokens of training" in shown.facts["b/step_1"]
    grid = text[text.index('id="models-and-recipes"') : text.index('id="curves"')]
    order = [name for name in ("w8a8-0", "w8a8-1", "rtn-w8", "rtn-w4", "rtn-w3", "&lt;w2&gt;") if name in grid]
    assert [grid.index(f"<td>{name}<") for name in order] == sorted(grid.index(f"<td>{name}<") for name in order)
    assert len(order) == 6
    assert ">(+0.0000)<" in grid, "within the noise"
    assert ">4.25<" in grid, "of one model"
    assert ">3.50 to 4.25<" in grid, "of two models with other overheads"
    assert ">4.25 to 4.50<" in grid


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "grid", [row("m", "rtn-w4", 0.1)])
    whole = (folder / "rows.jsonl").read_text()
    for broken, words in (
        ('{"key": 1}', "is missing"),
        (json.dumps({**json.loads(whole), "delta_interval": 3}), "it is no row"),
        (json.dumps({**json.loads(whole), "delta": "much"}), r"damage\.delta = 'much': .* valid number; it is no row"),
        (json.dumps({**json.loads(whole), "kl": "0.1"}), r"damage\.kl = '0\.1': .* valid number; it is no row"),
        (json.dumps({**json.loads(whole), "post_bits": "four"}), r"bits\.post_bits = 'four': .* valid integer"),
        (json.dumps({**json.loads(whole), "parameters": "many"}), "parameters = 'many': .* valid integer"),
        (json.dumps({**json.loads(whole), "noise_floor": []}), r"noise_floor = \[\]: .* valid number"),
        (json.dumps({**json.loads(whole), "recipe": 4}), "recipe = 4: .* valid string"),
    ):
        (folder / "rows.jsonl").write_text(f"{whole}{broken}\n")
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: cannot be read: .*{words}"):
            quantization.make(folder)
    (folder / "rows.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no rows yet"):
        quantization.make(folder)


def test_the_running_mean_is_one_of_numbers() -> None:
    values = np.ones(400)
    values[100], values[200] = 41.0, np.nan
    mean = smooth(values)
    assert mean[100] == pytest.approx(1 + 40 / 11), "over a fortieth of the run"
    assert mean[94] == mean[106] == mean[200] == 1
    assert smooth(np.array([3.0, 1.0])).tolist() == [3, 1]


def test_the_few_highest_points_do_not_press_the_others_flat() -> None:
    losses = np.concatenate([[11.0, 9.0], np.linspace(3, 2, 400)])
    cut = figures.cut_off(losses)
    assert cut is not None
    assert cut[0] < 2
    assert 3 <= cut[1] < 4
    assert figures.cut_off(np.linspace(3, 2, 400)) is None
    assert figures.cut_off(np.ones(3)) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.002, "0.002"),
        (1000, "1000"),
        (41_000, "41k"),
        (1_310_000, "1.31M"),
        (7e9, "7B"),
        (-2e13, "-20T"),
        (3e18, "3e+18"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$x", "$\\frac$", "a_b", "_hidden", "<b>"])
def test_any_name_can_be_drawn(name: str) -> None:
    line = figures.Line(name, np.array([1.0, 2.0]), np.array([1.0, np.nan]))
    assert figures.lines([line, line], figures.Scale(name)).startswith(b"\x89PNG")
