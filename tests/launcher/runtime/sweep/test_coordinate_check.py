"""The coordinate check as a sweep: a real cell's records, slopes and gates from results, what is refused.

What is measured, and that wrong multipliers are seen, is tested in tests/model/diagnostics/test_coordinate_check.py.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import open_inputs
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.sweep.coordinate_check import CoordinateCheckConfig, check, lines, run, summarize
from plumbline.launcher.runtime.sweep.coordinate_check_plot import plot
from plumbline.launcher.runtime.sweep.result import Result, RunOutcome
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.model.diagnostics.coordinate_check import GATES
from tests.launcher.runtime.sweep.conftest import make_result

SETTINGS = CoordinateCheckConfig(curves="rule")
WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
QUANTITIES = {gate.quantity for gates in GATES.values() for gate in gates} | {"size/residual", "size/logits"}


def result(rule: str, width: int, depth: int, seed: int, power: float, lr: float = 0.01) -> Result:
    """Return a cell in which every quantity goes as (width / 32)^power, or (depth / 2)^power, with a little noise."""
    value = (width / 32 * depth / 2) ** power * (1 + 0.01 * seed)
    written = {"coordinates": {str(step): dict.fromkeys(QUANTITIES, value) for step in (0, 1, 10)}}
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "base_hidden_size": 32}
    return make_result({"rule": rule}, seed, RunOutcome(result=written), lr=lr, **sizes)


def results() -> list[Result]:
    """Vary widths at one rate, depths at another: the base occurs at both."""
    found = []
    for rule, power in (("flat", 0.0), ("grows", 1.0)):
        for seed in (1, 2):
            found += [result(rule, width, 2, seed, power) for width in (32, 64, 128)]
            found += [result(rule, 32, depth, seed, -power, lr=0.001) for depth in (2, 8)]
    return found


def test_a_cell_trains_on_one_batch_and_records_what_it_saw(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config, [f"run.root={tmp_path}", "run.name=cell", "train.steps=4"])
    config.run.folder.mkdir()
    assert run(config, open_inputs(config, WORLD), WORLD, StopRequest(), RunStatus())
    written = json.loads((config.run.folder / "result.json").read_text())
    assert written["step"] == 4
    assert list(written["coordinates"]) == ["0", "1", "2", "4"]
    first, last = (written["coordinates"][step] for step in ("0", "4"))
    assert first.keys() >= QUANTITIES
    assert first["change/residual"] == first["spectral_change/hidden"] == 0.0
    assert last["change/residual"] > 0


def test_slopes_are_fitted_over_the_sizes_of_one_family() -> None:
    summary = summarize(SETTINGS, results())
    assert {family: list(curves) for family, curves in summary.families.items()} == {
        "width": ["flat", "grows"],
        "depth": ["flat", "grows"],
    }
    grows = {family: curves["grows"] for family, curves in summary.families.items()}
    for family, expected in (("width", 1.0), ("depth", -1.0)):
        slope = grows[family].slopes["change/residual"][10]
        assert slope.slope == pytest.approx(expected)
        assert slope.error == pytest.approx(0.0, abs=1e-9)
    values = grows["width"].slopes["size/logits"][0].values
    assert values == pytest.approx({32: 1.015, 64: 2.03, 128: 4.06})


def test_every_gate_is_held_against_its_slope() -> None:
    curves = summarize(SETTINGS, results()).families
    for family, gates in GATES.items():
        for label, power in (("flat", 0.0), ("grows", 1.0 if family == "width" else -1.0)):
            met = curves[family][label].gates
            assert [(row.quantity, row.step) for row in met] == [(gate.quantity, gate.step) for gate in gates]
            assert [row.passes for row in met] == [gate.low <= power <= gate.high for gate in gates]
    text = "\n".join(lines(summarize(SETTINGS, results())))
    assert "+1.00±0.00 x" in text
    assert "FAILS" in text


def test_runs_that_end_before_a_gate_do_not_pass() -> None:
    cells = [cell for cell in results() if cell.labels["rule"] == "grows"]
    for cell in cells:
        assert cell.outcome.result is not None
        recorded = cell.outcome.result["coordinates"]
        recorded["1"]["change/block"] = 1 / cell.num_hidden_layers  # the one gate over depth before step 10
        del recorded["10"]
    verdicts = [line.strip() for line in lines(summarize(SETTINGS, cells)) if line.startswith(" " * 61)]
    assert verdicts == ["FAILS", "ends before 10"]


def test_the_document_has_the_keys_it_always_had() -> None:
    cells = []
    for width, value in ((32, 1.0), (64, 2.0)):
        outcome = RunOutcome(result={"coordinates": {"10": {"size/residual": value}}})
        cells.append(make_result({"rule": "grows"}, 1, outcome, hidden_size=width, base_hidden_size=32))
    written = json.dumps(summarize(SETTINGS, cells).to_json())
    assert json.dumps(json.loads(written, parse_float=lambda text: round(float(text), 9))) == (
        '{"base": {"width": 32, "depth": 2}, "families": {"width": {"grows": {"slopes": {"size/residual": {"10": '
        '{"slope": 1.0, "error": null, "values": {"32": 1.0, "64": 2.0}}}}, "gates": [{"quantity": "size/residual", '
        '"step": 10, "low": -0.3, "high": 0.3, "slope": 1.0, "error": null, "passes": false}]}}, "depth": {}}}'
    )


def test_a_run_that_blew_up_fails_its_gates() -> None:
    broken = results()
    for cell in broken:
        if cell.labels["rule"] == "grows" and cell.hidden_size == 128:
            assert cell.outcome.result is not None
            cell.outcome.result["coordinates"]["10"]["size/residual"] = float("nan")
    summary = summarize(SETTINGS, broken)
    gate = next(row for row in summary.families["width"]["grows"].gates if row.quantity == "size/residual")
    assert (gate.slope, gate.passes) == (None, False)
    assert "no slope  x" in "\n".join(lines(summary))


def test_what_does_not_change_at_all_fails_its_gates(tmp_path: Path) -> None:
    still = [cell for cell in results() if cell.labels["rule"] == "flat"]
    for cell in still:
        assert cell.outcome.result is not None
        for record in cell.outcome.result["coordinates"].values():
            record["change/residual"] = 0.0
    summary = summarize(SETTINGS, still)
    for family in ("width", "depth"):
        curve = summary.families[family]["flat"]
        assert list(curve.slopes["change/residual"]) == [1, 10], "at initialisation nothing has changed"
        gate = next(row for row in curve.gates if row.quantity == "change/residual")
        assert (gate.slope, gate.passes) == (None, False)
    plot(summary, tmp_path / "figure.png")


def test_a_real_run_that_blows_up_fails_its_gates(tiny_config: Path, tmp_path: Path) -> None:
    cells = []
    for width in (64, 128):
        given = [f"run.root={tmp_path}", f"run.name=w{width}", "train.steps=10", f"model.hidden_size={width}"]
        config = load_config(tiny_config, [*given, "optimizer.lr=1e38"])
        config.run.folder.mkdir()
        assert run(config, open_inputs(config, WORLD), WORLD, StopRequest(), RunStatus())
        written = json.loads((config.run.folder / "result.json").read_text())
        cells.append(make_result({"rule": "wild"}, 1, RunOutcome("finished", result=written), hidden_size=width))
    summary = summarize(SETTINGS, [*cells, *(replace(cell, labels={"rule": "calm"}) for cell in calm())])
    wild = summary.families["width"]["wild"].gates
    assert [row.quantity for row in wild] == [gate.quantity for gate in GATES["width"]]
    assert {row.quantity for row in wild if row.slope is None} >= {"spectral/hidden", "change/map", "size/residual"}
    assert "FAILS" in "\n".join(lines(summary))
    plot(summary, tmp_path / "figure.png")


def calm() -> list[Result]:
    """Return cells of the sizes of the real ones, in which nothing changes with size, nor at all before step 1."""
    cells = [result("calm", width, 2, 1, 0.0) for width in (64, 128)]
    for cell in cells:
        assert cell.outcome.result is not None
        cell.outcome.result["coordinates"]["0"]["size/logits"] = 0.0
    return [replace(cell, base_hidden_size=64) for cell in cells]


def test_a_curve_with_a_failed_run_is_named(tmp_path: Path) -> None:
    failed = [
        replace(cell, outcome=RunOutcome("failed"))
        if cell.labels["rule"] == "grows" and cell.hidden_size == 128
        else cell
        for cell in results()
    ]
    summary = summarize(SETTINGS, failed)
    assert list(summary.families["width"]) == ["flat"]
    assert "width: grows is incomplete: a run of width 128 failed" in list(lines(summary))
    assert summary.to_json()["failed"] == {"width": {"grows": [128]}, "depth": {}}
    alone = summarize(SETTINGS, [cell for cell in failed if cell.labels["rule"] == "grows" and cell.lr == 0.01])
    assert list(lines(alone)) == ["width: grows is incomplete: a run of width 128 failed", ""]


def test_what_is_not_finished_is_left_out(tmp_path: Path) -> None:
    partly = [
        replace(cell, outcome=RunOutcome()) if cell.seed == 2 and cell.hidden_size == 64 else cell
        for cell in results()
        if cell.labels["rule"] == "flat"
    ]
    summary = summarize(SETTINGS, partly)
    assert summary.families["width"]["flat"].slopes["size/logits"][0].values[64] == pytest.approx(1.01)
    plot(summary, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    nothing = [replace(cell, outcome=RunOutcome()) for cell in partly]
    assert summarize(SETTINGS, nothing).families == {"width": {}, "depth": {}}
    assert list(lines(summarize(SETTINGS, nothing))) == []


def test_cells_that_one_picture_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a sweep of this kind says `coordinate_check: .curves: AXIS.`"):
        check(None, results())
    with pytest.raises(ValueError, match=r"curves = 'size': a grid has no such axis, only rule"):
        check(CoordinateCheckConfig(curves="size"), results())
    other_rate = [*results(), *(result("flat", width, 2, 1, 0.0, lr=0.1) for width in (32, 64))]
    with pytest.raises(ValueError, match=r"optimizer\.lr: 0\.01, 0\.1 for one width check; keep them in sweeps apart"):
        check(SETTINGS, other_rate)
    check(SETTINGS, results())


def test_runs_that_differ_in_an_axis_that_no_picture_shows_are_refused() -> None:
    decays = (0.0, 0.1)
    mixed = [
        replace(cell, labels={**cell.labels, "optimizer.weight_decay": decay}, signature=f"{number} at {decay}")
        for decay in decays
        for number, cell in enumerate(results())
    ]
    with pytest.raises(
        ValueError, match=r"coordinate_check: .* differ in more than curve, width, depth, optimizer\.lr"
    ):
        check(SETTINGS, mixed)
    check(SETTINGS, mixed[: len(results())])


def test_the_result_of_another_kind_of_sweep_is_refused() -> None:
    trained = replace(results()[0], run="runs/a", outcome=RunOutcome("finished", result={"step": 4, "eval/a/loss": 3}))
    with pytest.raises(ValueError, match=r"coordinate_check: runs/a was trained by a sweep of another kind"):
        check(SETTINGS, [trained, *results()[1:]])
