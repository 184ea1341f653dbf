"""What results.jsonl says of runs that ended in different ways, from their folders."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml

from plumbline.launcher.runtime.optim.schedule import BranchConfig
from plumbline.launcher.runtime.sweep.cells import Cell
from plumbline.launcher.runtime.sweep.config import parse_sweep
from plumbline.launcher.runtime.sweep.plan import Plan, make_plan
from plumbline.launcher.runtime.sweep.result import Outliers, read_rows
from plumbline.launcher.runtime.sweep.results import (
    SweepSummary,
    check_same_cells,
    read_results,
    summarize,
    write_results,
)

LOSSES = [5.0, 4.0, 3.0, 2.0]


def rows_of_another_machine_count(file: Path, plan: Plan, rows: Path, tmp_path: Path) -> None:
    """Assert that rows without their runs are results, that what they finished is not made again, and no others are."""
    assert read_rows(rows) == read_results(plan.cells)
    again = make_plan(file, [], rows=rows)
    assert again.unfinished(again.cells) == again.cells[2:]
    moved = tmp_path / "moved"
    plan.sweep.folder.rename(moved)
    assert plan.unfinished(plan.cells) == plan.cells
    assert again.unfinished(again.cells) == again.cells[2:]
    known = write_results(again.sweep, again.cells, again.elsewhere)
    assert known == summarize(plan.sweep, read_rows(moved / "results.jsonl"))
    shutil.rmtree(plan.sweep.folder)
    moved.rename(plan.sweep.folder)
    with pytest.raises(ValueError, match=r"results\.jsonl: 2 of its 2 finished runs are none of this sweep's"):
        make_plan(file, ["train.steps=7"], rows=rows)
    (tmp_path / "other.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl, line 1: not a row .* 'status' is missing"):
        read_rows(tmp_path / "other.jsonl")
    line = rows.read_text().splitlines()[0] + "\n"
    (loss,) = re.findall(r'"loss": [\d.]+', line)
    (tmp_path / "other.jsonl").write_text(line + line + line.replace(loss, '"loss": 9.5'))
    with pytest.raises(ValueError, match=r"line 3: loss = 9\.5 of the run \w+, which has [\d.]+ in line 1; keep one"):
        read_rows(tmp_path / "other.jsonl")
    (tmp_path / "other.jsonl").write_text(line.replace(loss, '"loss": "low"'))
    with pytest.raises(ValueError, match=r"line 1: not a row .*: loss = 'low': Input should be a valid number"):
        read_rows(tmp_path / "other.jsonl")
    (tmp_path / "other.jsonl").write_text(line.replace(loss, '"loss": NaN'))
    assert [row.outcome.loss for row in read_rows(tmp_path / "other.jsonl")] == [None]
    (tmp_path / "other.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has no rows; give the results\.jsonl of a sweep"):
        read_rows(tmp_path / "other.jsonl")


def test_outcomes_are_read_from_the_run_folders(tiny_config: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    grids = [{"axes": {"optimizer.lr": [0.1, 0.2, 0.3]}}]
    file.write_text(yaml.safe_dump({"name": "s", "root": str(tmp_path), "base": str(tiny_config), "grids": grids}))
    plan = make_plan(file, [])
    finished, diverged, _ = folders = [cell.config.run.folder for cell in plan.cells]
    for folder in folders[:2]:
        folder.mkdir(parents=True)
    lines = [
        {"step": step, "tokens": 100 * step, "loss": loss, "tokens_per_second": 50.0 * step}
        for step, loss in enumerate(LOSSES, start=1)
    ]
    seen = {"stream/kurt/00": 4.0, "stream/kurt/head": 2.0, "stream/mmr/head": 3.0, "stream/corr_mean/head": 0.5}
    lines += [{"step": 4, "tokens": 400, **seen}, {"step": 4, "tokens": 400, "eval/a/loss": 2.5, "eval/b/loss": 3.5}]
    lines[-1] |= {"eval/a/exact_match": 0.25, "eval/b/exact_match": 0.75}
    (finished / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finished / "result.json").write_text(json.dumps(lines[-1]))
    (diverged / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    (diverged / "diverged.json").write_text("{}")

    first, second, third = (result.outcome for result in read_results(plan.cells))
    assert (first.status, first.loss, first.train_loss, first.tokens) == ("finished", 3.0, 2.0, 400)
    assert first.seconds == pytest.approx(100 * (1 / 50 + 1 / 100 + 1 / 150 + 1 / 200), abs=1e-3)
    assert first.outliers == Outliers(3.0, 4.0, 3.0, 0.5, None, 150.0)
    assert (first.exact_match, first.evaluations) == (0.5, {"exact_match": {4: 0.5}})
    assert first.result == lines[-1]
    assert (second.status, second.diverged, second.loss, second.tokens) == ("diverged", True, None, 100)
    assert (third.status, third.diverged, third.tokens) == ("pending", False, None)

    assert write_results(plan.sweep, plan.cells).runs == {"finished": 1, "diverged": 1, "pending": 1}
    assert " ".join((plan.sweep.folder / "summary.json").read_text().split()) == (
        '{ "name": "s", "kind": "grid", "cells": 3, "runs": { "finished": 1, "diverged": 1, "pending": 1 }, '
        '"grid": { "points": [ { "labels": { "optimizer.lr": 0.1 }, "loss": 3.0, "loss_error": null, '
        '"statuses": [ "finished" ] }, { "labels": { "optimizer.lr": 0.2 }, "loss": null, "loss_error": null, '
        '"statuses": [ "diverged" ] }, { "labels": { "optimizer.lr": 0.3 }, "loss": null, "loss_error": null, '
        '"statuses": [ "pending" ] } ] } }'
    ), "as it was written before summaries were dataclasses"
    rows = [json.loads(line) for line in (plan.sweep.folder / "results.jsonl").read_text().splitlines()]
    assert [(row["labels"], row["lr"], row["loss"]) for row in rows] == [
        ({"optimizer.lr": lr}, lr, loss) for lr, loss in ((0.1, 3.0), (0.2, None), (0.3, None))
    ]
    assert rows[0]["outliers"]["kurt_peak"] == 4.0
    rows_of_another_machine_count(file, plan, plan.sweep.folder / "results.jsonl", tmp_path)
    check_same_cells(plan.sweep, plan.cells)
    with pytest.raises(ValueError, match=r"holds 2 finished runs, none of them of these cells"):
        check_same_cells(plan.sweep, make_plan(file, ["train.steps=7"]).cells)


def test_the_seconds_of_a_branch_begin_where_it_does(tiny_config: Path, tmp_path: Path) -> None:
    cell = make_plan(small_sweep(tiny_config, tmp_path), []).cells[0]
    branch = BranchConfig(checkpoint="parent/step_00000010", from_step=10, steps=2)
    schedule = cell.config.schedule.model_copy(update={"branch": branch})
    cell = Cell(cell.labels, cell.config.model_copy(update={"schedule": schedule}))
    tokens = cell.config.data.batch_plan.tokens_before
    lines = [{"step": step, "tokens": tokens(step), "loss": 2.0, "tokens_per_second": 1.0} for step in (11, 12)]
    cell.config.run.folder.mkdir(parents=True)
    (cell.config.run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (cell.config.run.folder / "result.json").write_text('{"step": 12}')
    (found,) = read_results([cell])
    assert found.outcome.seconds == tokens(12) - tokens(10)


@pytest.mark.parametrize(
    ("above", "held_out", "status"),
    # The plain prediction of a model that is trained to predict with thoughts may get worse than guessing
    [(0.99, 99.0, "finished"), (0.99, math.nan, "diverged"), (1.01, 1.0, "diverged"), (math.nan, 1.0, "diverged")],
)
def test_a_run_that_ends_a_nat_above_guessing_has_diverged(
    above: float, held_out: float, status: str, tiny_config: Path, tmp_path: Path
) -> None:
    plan = make_plan(small_sweep(tiny_config, tmp_path), [])
    config = plan.cells[0].config
    config.run.folder.mkdir(parents=True)
    line = {"step": 20, "tokens": 9, "loss": math.log(config.model.vocab_size) + above, "tokens_per_second": 1.0}
    (config.run.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (config.run.folder / "result.json").write_text(json.dumps({"step": 20, "tokens": 9, "eval/a/loss": held_out}))
    outcome = read_results(plan.cells)[0].outcome
    assert (outcome.status, outcome.diverged, outcome.loss is None) == (status, *2 * [status == "diverged"])


def small_sweep(base: Path, folder: Path) -> Path:
    """Write a sweep of two points and two seeds."""
    file = folder / "sweep.yaml"
    sweep = {"name": "s", "root": str(folder), "base": str(base), "seeds": [1, 2]}
    file.write_text(yaml.safe_dump({**sweep, "grids": [{"axes": {"optimizer.lr": [0.1, 0.2]}}]}))
    return file


def finish(cell: Cell, loss: float) -> None:
    """Write what a finished run leaves."""
    cell.config.run.folder.mkdir(parents=True)
    line = {"step": 1, "tokens": 100, "loss": loss, "tokens_per_second": 50.0}
    (cell.config.run.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (cell.config.run.folder / "result.json").write_text(json.dumps({"step": 1, "eval/a/loss": loss}))


def write_of(plan: Plan) -> SweepSummary:
    """Write the results of a plan as sweep.py does."""
    return write_results(plan.sweep, plan.cells, plan.elsewhere, {cell.config.run.seed for cell in plan.runs})


def test_a_summary_is_of_the_seeds_that_have_begun(tiny_config: Path, tmp_path: Path) -> None:
    """As --summarize asks for it, with no seeds: else it would undo the summary of --seeds 1."""
    plan = make_plan(small_sweep(tiny_config, tmp_path), [])
    assert write_results(plan.sweep, plan.cells, seeds=()).runs == {"pending": 4}, "with none, all are to come"
    for cell in plan.cells:
        if cell.config.run.seed == 1:
            finish(cell, loss=3.0)
    assert write_results(plan.sweep, plan.cells, seeds=()).runs == {"finished": 2}
    assert write_results(plan.sweep, plan.cells, seeds=(2,)).runs == {"finished": 2, "pending": 2}


def test_finished_rows_stay_when_their_runs_are_gone(tiny_config: Path, tmp_path: Path) -> None:
    plan = make_plan(small_sweep(tiny_config, tmp_path), [])
    finish(plan.cells[0], loss=3.0)
    before = write_of(plan)
    assert before.runs == {"finished": 1, "pending": 3}
    rows = (plan.sweep.folder / "results.jsonl").read_text()
    shutil.rmtree(plan.sweep.folder / "runs")
    assert write_of(plan) == before
    assert (plan.sweep.folder / "results.jsonl").read_text() == rows
    finish(plan.cells[0], loss=2.0)
    write_of(plan)
    assert json.loads((plan.sweep.folder / "results.jsonl").read_text().splitlines()[0])["loss"] == 2.0, "made anew"
    (plan.sweep.folder / "results.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1: not a row"):
        write_of(plan)
    assert (plan.sweep.folder / "results.jsonl").read_text() == "{}\n", "it may be all that is left of runs"


def test_finished_rows_of_other_cells_stay_beside_the_results(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = small_sweep(tiny_config, tmp_path)
    plan, other = make_plan(file, []), make_plan(file, ["train.steps=7"])
    for cell, loss in zip(plan.cells, (3.0, 2.0, 4.0), strict=False):
        finish(cell, loss)
    before = write_of(plan)
    assert not (plan.sweep.folder / "others.jsonl").exists()
    shutil.rmtree(plan.sweep.folder / "runs")
    check_same_cells(other.sweep, other.cells, train=True)
    assert re.search(r"warning: .*holds 3 finished runs, none of them of these cells: give", capsys.readouterr().err)
    for _ in range(2):
        assert write_of(other).runs == {"pending": 4}
        assert "others.jsonl keeps 3 finished run(s) of other cells" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"holds 3 finished runs, none of them of these cells"):
        check_same_cells(other.sweep, other.cells)
    check_same_cells(plan.sweep, plan.cells)
    finish(other.cells[0], 1.0)
    assert write_of(other).runs == {"finished": 1, "pending": 3}
    shutil.rmtree(plan.sweep.folder / "runs")
    assert write_of(plan) == before, "they count again with their cells"
    assert write_of(other).runs == {"finished": 1, "pending": 3}


def test_results_are_over_all_seeds_that_were_begun(tiny_config: Path, tmp_path: Path) -> None:
    file = small_sweep(tiny_config, tmp_path)
    first, second = (make_plan(file, [], seeds=[seed]) for seed in (1, 2))
    for cell, loss in zip(first.runs, (3.0, 2.0), strict=True):
        finish(cell, loss)
    alone = write_of(first)
    assert (alone.cells, alone.runs) == (2, {"finished": 2}), "the other seed was not begun"
    finish(second.runs[0], 4.0)
    both = write_of(second)
    assert (both.cells, both.runs) == (4, {"finished": 3, "pending": 1})
    rows = [json.loads(line) for line in (first.sweep.folder / "results.jsonl").read_text().splitlines()]
    assert sorted(row["loss"] for row in rows if row["seed"] == 1) == [2.0, 3.0]
    assert write_of(first) == both, "whichever seeds are asked for"


def test_a_seed_whose_runs_failed_stays_in_the_results(tiny_config: Path, tmp_path: Path) -> None:
    file = small_sweep(tiny_config, tmp_path)
    first, second = (make_plan(file, [], seeds=[seed]) for seed in (1, 2))
    first.runs[0].config.run.folder.mkdir(parents=True)
    (first.runs[0].config.run.folder / "error.txt").write_text("RuntimeError: broken\n")
    assert write_of(second).runs == {"failed": 1, "pending": 3}


def test_no_figure_of_another_kind_stays(tiny_config: Path, tmp_path: Path) -> None:
    plain = make_plan(small_sweep(tiny_config, tmp_path), [])
    other = {"kind": "comparison", "comparison": {"variants": "optimizer.lr"}}
    compared = parse_sweep({**plain.sweep.model_dump(), **other}, "s.yaml")
    write_results(compared, plain.cells)
    assert (plain.sweep.folder / "summary.png").is_file()
    write_of(plain)
    assert not (plain.sweep.folder / "summary.png").exists()


def test_rows_of_another_sweep_are_refused(tiny_config: Path, tmp_path: Path) -> None:
    plain = make_plan(small_sweep(tiny_config, tmp_path), [])
    write_of(plain)
    rows = read_rows(plain.sweep.folder / "results.jsonl")
    for settings, words in ((None, "comparison: missing"), ({"variants": "rule"}, "no such axis, only optimizer.lr")):
        other = {"kind": "comparison", "comparison": settings}
        compared = parse_sweep({**plain.sweep.model_dump(), **other}, "s.yaml")
        with pytest.raises(ValueError, match=words):
            summarize(compared, rows)
