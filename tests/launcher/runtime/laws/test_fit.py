"""`fit.py`: rows to law.json and figures, one line for a mistake."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.launcher import fit
from plumbline.launcher.runtime.laws.document import derive, open_law
from plumbline.launcher.runtime.laws.rows import read_rows
from plumbline.model.scaling_laws.points import points
from plumbline.model.scaling_laws.published import KUMAR
from tests.conftest import REPOSITORY
from tests.launcher.runtime.laws.conftest import ROW, synthetic, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.launcher.runtime.laws.conftest import Run


def test_the_law_and_its_figures_are_written(fitted: dict[str, Any]) -> None:
    folder, facts = fitted["folder"], fitted["facts"]
    assert {path.name for path in folder.iterdir()} == {"law.json", "predicted.png", "f.png", "post_delta.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    assert json.loads((folder / "law.json").read_text()) == facts
    assert (facts["form"], facts["bootstrap"], facts["held_out"]["how"]) == ("precision", 6, "0.2")
    assert facts["training"]["parameters"] == [30e6, 220e6]
    assert facts["training"]["points"] + facts["held_out"]["points"] == 81
    assert facts["training"]["runs"] == 54 - 11
    assert facts["constants"]["gamma_w"] == pytest.approx(KUMAR.gamma_w, rel=0.1)
    assert facts["constants"]["E"] == pytest.approx(KUMAR.E, rel=0.02)
    assert "gamma_a" not in facts["constants"]


def test_the_law_says_how_far_to_trust_it(fitted: dict[str, Any]) -> None:
    facts = fitted["facts"]
    assert facts["fit"]["r2"] > 0.99
    assert facts["held_out"]["r2"] > 0.99
    assert facts["fit_post"]["r2"] > 0.99
    low, high = facts["bands"]["alpha"]
    assert low < facts["constants"]["alpha"] < high
    assert "activation_bits is 16 in all points: there is no f_a in the law" in facts["warnings"]
    curve = facts["curves"]["w"]
    assert (curve["bits"][0], curve["bits"][-1]) == (3, 16)
    assert all(
        low - 1e-3 <= f <= high + 1e-3 for low, f, high in zip(curve["low"], curve["f"], curve["high"], strict=True)
    )
    derived = facts["derived"]
    assert derived["flops"] == pytest.approx(6 * 220e6 * 26e9)
    assert derived["optimal_bits_band"][0] <= derived["optimal_bits"] <= derived["optimal_bits_band"][1]
    best = derived["at_16_bits"]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(derived["flops"])
    assert derived["critical_tokens_per_parameter"]["parameters"] == 220e6
    assert not any("not stated" in warning for warning in facts["warnings"])


@pytest.mark.parametrize(("without", "stated"), [(0, True), (1, True), (2, False), (20, False)])
def test_an_optimum_that_many_fits_lack_has_no_band(without: int, stated: bool) -> None:
    """(1 - exp(-P)) / P falls everywhere: fewer bits are always better. A band of the other fits would say too much."""
    none = replace(KUMAR, gamma_w=1.0, n_w=0.0, gamma_a=math.nan, gamma_kv=math.nan)
    fitted: Any = SimpleNamespace(law=KUMAR, train=SimpleNamespace(at=points(3e7, 1e9)), undetermined=frozenset())
    derived = derive(fitted, [none] * without + [KUMAR] * (20 - without))
    assert derived["optimal_bits"] == pytest.approx(7.0, abs=0.01)
    assert derived["no_optimal_bits"] == pytest.approx(without / 20)
    assert (derived["optimal_bits_band"] is not None) == stated


def test_what_was_left_out_is_told(fitted: dict[str, Any]) -> None:
    assert "81 points from 2 file(s)" in fitted["stderr"]
    assert "left out: 1 diverged, 1 pending, 2 no loss, 1 repeated" in fitted["stderr"]
    assert fitted["facts"]["training"]["left_out"] == {"diverged": 1, "pending": 1, "no loss": 2, "repeated": 1}


def test_points_of_several_settings_are_warned_of(run: Run, tmp_path: Path) -> None:
    """Seeds are none, nor is a run that stands there by two labels."""
    rows = [{**row, "lr": 0.1, "labels": {"rule": "sp"}, "seed": 1} for row in synthetic()]
    same = [{**rows[0], "run": "again", "seed": 2, "loss": 3.0}, {**rows[0], "labels": {"rule": "mup"}}]
    assert read_rows([write(tmp_path / "same.jsonl", [*rows, *same])]).mixed == 0
    ways = [
        {**rows[0], "post_bits": 4, "base_loss": 2.0, "loss": loss, "post": {"name": name, "method": name}}
        for name, loss in (("rtn", 2.3), ("gptq", 2.2))
    ]
    assert read_rows([write(tmp_path / "ways.jsonl", ways)]).mixed == 1
    assert read_rows([write(tmp_path / "way.jsonl", [ways[0], {**ways[0], "run": "again", "loss": 2.1}])]).mixed == 0
    other = [{**rows[0], "run": "other", "lr": 0.2}, {**rows[1], "run": "one more", "labels": {"rule": "mup"}}]
    file = write(tmp_path / "other.jsonl", [*rows, *same, *other])
    code, output, _ = run(fit.main, file, "--output", tmp_path / "law", "--bootstrap", "0")
    assert code == 0
    assert "warning    at 2 of the (N, D, bits) points differ in learning rate, labels or way of" in output


def test_a_rounded_loss_is_compared_with_that_of_its_own_weights(tmp_path: Path) -> None:
    """A run trained anew under its name has another loss; of its recipes one was measured again."""
    at = {**ROW, "run": "a", "data_fingerprint": "f"}
    anew, before = {**at, "base_loss": 2.75}, {**at, "base_loss": 3.0}
    rows = [{**before, "post_bits": 3, "loss": 3.5}, {**before, "post_bits": 4, "loss": 3.125}]
    rows.append({**anew, "post_bits": 4, "loss": 2.875})
    paired, deltas = read_rows([write(tmp_path / "rows.jsonl", rows)]).measured.post_deltas()
    assert list(zip(paired.at.post_bits, deltas, strict=True)) == [(3, 0.5), (4, 0.125), (4, 0.125)]


def test_a_law_comes_back_as_it_was(fitted: dict[str, Any]) -> None:
    sourced = open_law(str(fitted["folder"] / "law.json"))
    assert sourced.law.constants == fitted["facts"]["constants"]
    assert sourced.tokens == (1.5e9, 26e9)
    assert "fitted to " in sourced.source


def test_the_tables_are_for_people(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "points.jsonl", synthetic())
    code, output, _ = run(fit.main, file, "--output", tmp_path / "c", "--form", "chinchilla", "--bootstrap", "0")
    assert code == 0
    assert "alpha " in output
    assert "R^2 0." in output
    assert "warning    weight_bits varies, and this form does not know it" in output
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"law.json", "predicted.png", "post_delta.png"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW, {key: value for key, value in ROW.items() if key != "tokens"}], "points.jsonl, line 2: no key 'tokens'"),
        ([{**ROW, "loss": "low"}], "points.jsonl, line 1: loss = 'low' must be a positive number"),
        ([{**ROW, "weight_bits": 0}], "line 1: weight_bits = 0 must be a positive number"),
        ([{**ROW, "post_bits": True}], "line 1: post_bits = True must be a positive number"),
        ([ROW, "{"], "points.jsonl, line 2: not JSON"),
        (["[1]"], "points.jsonl, line 1: a list, not an object"),
        ([{**ROW, "loss": None}], "no finished point; left out: {'no loss': 1}"),
        ([{**ROW, "weight_bits": 4}], "weight_bits is 4 in all points"),
    ],
    ids=["missing", "text", "zero", "bool", "json", "list", "nothing", "one-width"],
)
def test_a_row_that_is_no_point_is_one_clear_error(run: Run, tmp_path: Path, rows: list[Any], words: str) -> None:
    file = write(tmp_path / "points.jsonl", rows)
    code, _, errors = run(fit.main, file, "--output", tmp_path / "out")
    assert code == 2
    last = errors.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert not (tmp_path / "out").exists(), "nothing was made"


def test_wrong_requests_are_refused(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "points.jsonl", [ROW])
    assert run(fit.main, file, "--output", tmp_path / "out", "--form", "kumar") == (
        2,
        "",
        "error: form 'kumar': unknown; one of precision, chinchilla, post_power, granularity, float\n",
    )
    (tmp_path / "law.json").write_text('{"law": "mine"}')
    code, _, errors = run(fit.main, file, "--output", tmp_path)
    assert code == 2
    assert "law.json: exists and was not written by this command; nothing was replaced" in errors
    code, _, errors = run(fit.main, file, "--output", file)
    assert code == 2
    assert errors == f"error: --output {file}: {file} is not a folder; move it away, or choose another name\n"
    assert (tmp_path / "law.json").read_text() == '{"law": "mine"}'
    code, _, errors = run(fit.main, file, "--output", tmp_path / "out", "--seed", "-1")
    assert (code, errors.splitlines()[-1]) == (2, "verb.py: error: argument --seed: -1 is less than 0")
    with pytest.raises(ValueError, match=r"neither a file nor a folder with results.jsonl or rows.jsonl"):
        read_rows([tmp_path])


def test_optional_keys_become_columns(tmp_path: Path) -> None:
    rows = [
        {**ROW, "weight_format": "e4m3", "group_size": 32, "run": "a"},
        {**ROW, "weight_format": "int4", "post_bits": 4, "run": "a"},
        {**ROW, "loss": 2.9},
        {**ROW, "loss": 2.8},
    ]
    measured = read_rows([write(tmp_path / "points.jsonl", rows)]).measured
    at = measured.at
    assert (at.exponent_bits[0], at.mantissa_bits[0], at.group_size[0]) == (4, 3, 32)
    assert np.isnan([at.exponent_bits[1], at.group_size[1]]).all()
    assert list(at.post_bits) == [np.inf, 4, np.inf, np.inf]
    assert list(measured.runs) == [0, 0, 1, 2], "rows without a run are checkpoints of their own"


def test_the_page_says_what_its_rows_give(run: Run, tmp_path: Path) -> None:
    """Figures of docs/laws.md without bounds, which are drawn."""
    rows = [REPOSITORY / "docs" / "results" / name for name in ("precision.jsonl", "precision_rtn.jsonl")]
    code, _, errors = run(fit.main, *rows, "--output", tmp_path / "law", "--bootstrap", "0")
    assert code == 0, errors
    law = json.loads((tmp_path / "law" / "law.json").read_text())
    page = (REPOSITORY / "docs" / "laws.md").read_text()
    fitted, after = law["fit"], law["fit_post"]
    assert (
        f"| nothing: {law['training']['points']} points | {fitted['r2']:.3f} of all losses, {after['r2']:.3f} of "
        f"delta_PTQ | {fitted['mean_absolute_error']:.3f}, {after['mean_absolute_error']:.4f} |"
    ) in page
    for name, digits in {"gamma_a": 1, "gamma_kv": 2, "gamma_post": 2, "gamma_N": 2, "gamma_D": 2}.items():
        assert f"| {name} | {law['constants'][name]:.{digits}f} (" in page
    assert law["derived"]["optimal_bits"] is None
    assert "| optimum of bits in training | not stated: the points leave gamma_w open |" in page
