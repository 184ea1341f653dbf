"""`fit.py` and `plan.py --law`: rows to law.json and figures, a prediction, one line for a mistake."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.launcher import fit, plan
from plumbline.launcher.runtime.laws import prediction
from plumbline.launcher.runtime.laws.document import derive, open_law
from plumbline.launcher.runtime.laws.rows import layout_of, read_rows
from plumbline.launcher.runtime.system import cli
from plumbline.model.quantization.precision import PrecisionConfig
from plumbline.model.scaling_laws.points import points
from plumbline.model.scaling_laws.published import KUMAR, published
from plumbline.model.scaling_laws.variants import FloatLaw, GranularityLaw
from tests.conftest import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Command

    Run = Callable[..., tuple[int, str, str]]

CHINCHILLA = ("A", "B", "E", "alpha", "beta")
FORMATS = [(8, "e4m3"), (6, "e2m3"), (6, "e3m2"), (4, "e2m1")]
SIZE = (10**8, 10**8, 2 * 10**9)  # parameters, those of them in blocks, and tokens
ROW = {"parameters": 30e6, "tokens": 1e9, "weight_bits": 16, "activation_bits": 16, "kv_bits": 16, "loss": 3.0}


def synthetic() -> list[dict[str, Any]]:
    """Return checkpoints of three sizes, weights trained at several widths, bf16 ones rounded; 0.1 % of noise."""
    generator = np.random.default_rng(0)
    rows = []
    for size in (30_000_000, 100_000_000, 220_000_000):
        for tokens in (1_500_000_000, 6_000_000_000, 26_000_000_000):
            for bits in (16, 8, 6, 5, 4, 3):
                for post in (None, 3, 4, 5) if bits == 16 else (None,):
                    at = points(size, tokens, bits, post_bits=np.inf if post is None else post)
                    loss = float(KUMAR.loss(at)) * float(np.exp(generator.normal(0, 0.001)))
                    row = {"run": f"{size}-{tokens}-{bits}", "parameters": size, "tokens": tokens, "weight_bits": bits}
                    rows.append({**row, "activation_bits": 16, "kv_bits": 16, "post_bits": post, "loss": loss})
    return rows


def write(file: Path, rows: list[Any]) -> Path:
    """Write JSON Lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an entry point in this process for exit code, standard output and error: its own would cost seconds."""

    def call(main: Callable[[], None], *arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["verb.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.run(main)
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def fitted(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what fit.py says of a sweep's folder and a report's, and where it wrote."""
    folder = tmp_path_factory.mktemp("laws")
    rows = synthetic()
    unfinished = [
        {"status": "diverged", "diverged": True, "loss": None, **{key: ROW[key] for key in ("parameters", "tokens")}},
        {"status": "pending", "loss": None},
        {**ROW, "loss": None},
        {**ROW, "loss": float("nan")},
    ]
    plain = [row for row in rows if row["post_bits"] is None]
    write(folder / "sweep" / "results.jsonl", [*unfinished, *plain, plain[0]])
    write(folder / "report" / "rows.jsonl", [row for row in rows if row["post_bits"] is not None])
    options = ("--hold-out", "0.2", "--bootstrap", "6", "--json")
    done = command("fit", folder / "sweep", folder / "report", "--output", folder / "out" / "mine", *options)
    assert done.returncode == 0, done.stderr
    return {"facts": json.loads(done.stdout), "folder": folder / "out" / "mine", "stderr": done.stderr}


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
    assert (code, errors) == (2, f"error: --output {file}: {file} is not a folder; choose another name\n")
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


def test_plan_predicts_with_a_published_law(command: Command, tiny_config: Path) -> None:
    done = command("plan", "--config", tiny_config, "--law", "kumar2411", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    law, size = facts["law"], facts["parameter_count"]["non_embedding"]
    assert (law["parameters"], law["tokens"]) == (size, 20 * 8 * 32)
    assert law["loss"] == pytest.approx(float(KUMAR.loss(points(size, 20 * 8 * 32))))
    assert law["flops"] == 6 * size * 20 * 8 * 32
    assert [row["bits"] for row in law["training"]] == [4, 5, 6, 7, 8, 12, 16]
    assert law["training"][-1]["loss"] == law["loss"] < law["training"][0]["loss"]
    assert law["at_optimal_bits"]["bits"] == pytest.approx(7.0, abs=0.01)
    assert law["at_optimal_bits"]["loss"] <= law["at_16_bits"]["loss"] <= law["loss"]
    assert law["at_this_size"]["parameters"] == size
    assert law["post"][0]["delta"] > law["post"][1]["delta"] > 0


def test_plan_counts_parameters_as_the_law_does(run: Run, tiny_config: Path) -> None:
    _, output, _ = run(plan.main, "--config", tiny_config, "--law", "besiroglu2404", "--json")
    facts = json.loads(output)
    law, total = facts["law"], facts["parameter_count"]["total"]
    assert (law["parameters"], law["counts_embedding"]) == (total, True)
    assert law["loss"] == pytest.approx(float(published("besiroglu2404").law.loss(points(total, 20 * 8 * 32))))
    _, output, _ = run(plan.main, "--config", tiny_config, "--law", "besiroglu2404")
    assert f"N {total:.4g} with embedding and head" in output


def test_plan_says_where_the_law_is_from(run: Run, tiny_config: Path, fitted: dict[str, Any]) -> None:
    code, output, _ = run(plan.main, "--config", tiny_config, "--law", "kumar2411")
    assert code == 0
    assert "law         kumar2411 (precision): Kumar et al., arXiv 2411.04330, table 2" in output
    assert "caution     published constants belong to their data and architecture and do not transfer" in output
    assert "is outside of the fit, 3e+07 to 2.2e+08" in output
    code, output, _ = run(plan.main, "--config", tiny_config, "--law", fitted["folder"] / "law.json")
    assert code == 0
    assert "law.json, fitted to " in output
    assert "do not transfer" not in output
    own = prediction.predict(str(fitted["folder"] / "law.json"), *SIZE, 50257, PrecisionConfig())
    assert any(line.endswith("   weight_bits") for line in prediction.lines(own)), "the widths that this law knows"


def test_a_loss_above_that_of_guessing_has_no_advice_with_it(run: Run, tiny_config: Path) -> None:
    asked = ("--config", tiny_config, "--law", "kumar2411")
    facts = json.loads(run(plan.main, *asked, "--json")[1])["law"]
    assert facts["is_above_guessing"]
    _, output, _ = run(plan.main, *asked)
    assert re.search(
        r"^caution     the loss is above that of guessing, ln \d+ = \d\.\d\d: the law", output, re.MULTILINE
    )
    assert f"prediction  {facts['loss']:.4f} nats" in output
    advice = ("best split", "best precision", "at this size ", "training bits", "bits after")
    assert [words for words in advice if words in output] == []
    large = prediction.predict("kumar2411", *SIZE, 50257, PrecisionConfig())
    assert not large.is_above_guessing
    assert not any("guessing" in note for note in large.notes)
    output = "\n".join(prediction.lines(large))
    assert [words for words in advice if words not in output] == []
    few = prediction.predict("kumar2411", *SIZE, int(math.exp(large.loss)), PrecisionConfig())
    assert few.is_above_guessing


def test_what_stands_on_an_open_constant_is_not_stated(run: Run, tiny_config: Path, tmp_path: Path) -> None:
    rows = [row for row in synthetic() if row["tokens"] == 6_000_000_000 and row["weight_bits"] == 16]
    file, folder = write(tmp_path / "points.jsonl", rows), tmp_path / "out"
    code, output, _ = run(fit.main, file, "--output", folder, "--bootstrap", "0", "--json")
    facts = json.loads(output)
    assert code == 0
    assert "gamma_D" in facts["undetermined"]
    assert facts["derived"]["critical_tokens_per_parameter"] is None
    assert facts["derived"]["at_16_bits"] is None
    caution = next(line for line in facts["warnings"] if line.startswith("D_crit: not stated, for the points do not "))
    assert "gamma_D" in caution
    law = json.loads(run(plan.main, "--config", tiny_config, "--law", folder / "law.json", "--json")[1])["law"]
    assert not any("critical_tokens" in row for row in law["post"])
    assert [note for note in law["notes"] if note in facts["warnings"]] == facts["warnings"], "each is told, once"
    assert caution in facts["warnings"]
    assert "at_16_bits" not in law


def test_no_best_precision_stands_on_an_open_f(run: Run, tiny_config: Path, tmp_path: Path) -> None:
    """Weights of 16 and 8 bits lose alike, so that the points leave gamma_w open."""
    rows = [row for row in synthetic() if row["post_bits"] is None and row["weight_bits"] in {16, 8}]
    plain = {row["run"].rsplit("-", 1)[0]: row["loss"] for row in rows if row["weight_bits"] == 16}
    rows = [{**row, "loss": plain[row["run"].rsplit("-", 1)[0]]} for row in rows]
    file, folder = write(tmp_path / "points.jsonl", rows), tmp_path / "out"
    code, output, _ = run(fit.main, file, "--output", folder, "--bootstrap", "0", "--json")
    facts = json.loads(output)
    assert (code, facts["undetermined"]) == (0, ["gamma_w"])
    assert facts["derived"]["optimal_bits"] is None
    assert "at_optimal_bits" not in facts["derived"]
    law = json.loads(run(plan.main, "--config", tiny_config, "--law", folder / "law.json", "--json")[1])["law"]
    assert "at_16_bits" in law
    assert not {"at_optimal_bits", "at_this_size"} & set(law)
    assert "the best precision: not stated, for the points do not determine gamma_w" in law["notes"]


def test_a_law_that_knows_no_bits_states_no_loss_in_low_precision(run: Run, tiny_config: Path, tmp_path: Path) -> None:
    rows = [row for row in synthetic() if row["weight_bits"] == 16 and row["post_bits"] is None]
    file, folder = write(tmp_path / "points.jsonl", rows), tmp_path / "out"
    assert run(fit.main, file, "--output", folder, "--form", "chinchilla", "--bootstrap", "0", "--json")[0] == 0
    asked = ("--config", tiny_config, "--law", folder / "law.json", "precision.weights=4")
    law = json.loads(run(plan.main, *asked, "--json")[1])["law"]
    assert law["loss_at_bits"] is None
    assert "this law knows no weight_bits: what training in this precision costs is left out" in law["notes"]
    assert "in this precision, bits of" not in run(plan.main, *asked)[1]
    plain = json.loads(run(plan.main, *asked[:-1], "--json")[1])["law"]
    assert plain["loss_at_bits"] == plain["loss"]


def in_formats() -> list[dict[str, Any]]:
    """Return checkpoints of three sizes, trained in bf16 and in float formats, in groups of two sizes."""
    law = FloatLaw(**{name: getattr(KUMAR, name) for name in CHINCHILLA}, k=2.0, delta_E=3.0, nu_M=2.0, gamma_G=1.0)
    formats = [(16, None, None), *((bits, name, group) for bits, name in FORMATS for group in (16, 128))]
    rows = []
    for size in (30_000_000, 100_000_000, 220_000_000):
        for tokens in (1_500_000_000, 6_000_000_000, 26_000_000_000):
            for bits, name, group in formats:
                row = {**ROW, "parameters": size, "tokens": tokens, "weight_bits": bits}
                exponent, mantissa = layout_of(name) or (np.nan, np.nan)
                own = {"exponent_bits": exponent, "mantissa_bits": mantissa, "group_size": group or np.nan}
                loss = float(law.loss(points(size, tokens, bits, **own)))
                rows.append({**row, "weight_format": name, "group_size": group, "loss": loss})
    return rows


def test_plan_predicts_with_the_format_and_groups_of_a_configuration(
    run: Run, tiny_config: Path, tmp_path: Path
) -> None:
    file, folder = write(tmp_path / "points.jsonl", in_formats()), tmp_path / "out"
    assert run(fit.main, file, "--output", folder, "--form", "float", "--bootstrap", "0")[0] == 0
    asked = ("--config", tiny_config, "--law", folder / "law.json", "--json")

    def predicted(weights: str) -> dict[str, Any]:
        law: dict[str, Any] = json.loads(run(plan.main, *asked, f"precision.weights={weights}")[1])["law"]
        return law

    def rounded(name: str, size: int) -> str:
        return f"{{format: {name}, granularity: group, group_size: {size}}}"

    law = open_law(str(folder / "law.json")).law
    coarse, fine, wider = (predicted(rounded(*of)) for of in (("e2m1", 32), ("e2m1", 16), ("e4m3", 16)))
    at = points(fine["parameters"], fine["tokens"], 4, group_size=16, exponent_bits=2, mantissa_bits=1)
    assert fine["loss_at_bits"] == pytest.approx(float(law.loss(at)))
    assert fine["loss"] < wider["loss_at_bits"] < fine["loss_at_bits"] < coarse["loss_at_bits"]
    unknown = predicted("4")
    assert unknown["loss_at_bits"] is None
    assert any(note.startswith("the loss in this precision is left out: weight_format: ") for note in unknown["notes"])


def test_a_law_of_one_format_states_no_loss_in_another(run: Run, tiny_config: Path, tmp_path: Path) -> None:
    base = {name: getattr(KUMAR, name) for name in CHINCHILLA}
    law = GranularityLaw(**base, k=1.0, gamma_D=0.1, gamma_N=0.2, gamma_G=0.8)
    rows = []
    for size in (30_000_000, 100_000_000, 220_000_000):
        for tokens in (1_500_000_000, 6_000_000_000, 26_000_000_000):
            for bits, group in ((16, None), (4, 16), (4, 32), (4, 128)):
                loss = float(law.loss(points(size, tokens, bits, bits, group_size=group or np.nan)))
                of = {"weight_bits": bits, "activation_bits": bits, "group_size": group, "loss": loss}
                rows.append({**ROW, "parameters": size, "tokens": tokens, **of})
    file, folder = write(tmp_path / "points.jsonl", rows), tmp_path / "out"
    assert run(fit.main, file, "--output", folder, "--form", "granularity", "--bootstrap", "0")[0] == 0
    asked = ("--config", tiny_config, "--law", folder / "law.json", "--json")

    def predicted(**formats: str) -> dict[str, Any]:
        quantizer = "precision.{}={{format: {}, granularity: group, group_size: 16}}"
        keys = [quantizer.format(site, name) for site, name in formats.items()]
        found: dict[str, Any] = json.loads(run(plan.main, *asked, *keys)[1])["law"]
        return found

    fine, plain = predicted(weights="int4", activations="int4"), predicted()
    assert fine["loss_at_bits"] > fine["loss"] == plain["loss_at_bits"]
    for formats, widths in (({"weights": "int8", "activations": "int8"}, "8/8/16"), ({"weights": "int4"}, "4/16/16")):
        other = predicted(**formats)
        assert other["loss_at_bits"] is None
        assert (
            "this law is about training in 4/4/16 bits of weights/activations/KV cache: what training in "
            f"{widths} costs is left out"
        ) in other["notes"]
    assert not any("this law is about" in note for note in (*fine["notes"], *plain["notes"]))


def test_plan_without_a_law_does_not_mention_one(run: Run, tiny_config: Path) -> None:
    assert "law" not in json.loads(run(plan.main, "--config", tiny_config, "--json")[1])
    assert "law " not in run(plan.main, "--config", tiny_config)[1]


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ("kumar", "error: law 'kumar': unknown; one of kumar2411, "),
        ("ouyang2411", "error: law ouyang2411: has no A, alpha, B, beta, E, so it predicts no loss, only what quanti"),
        ("ouyang2411", "it serves quantize.py --law; plan.py needs a whole law, such as kumar2411"),
        ("chen2505-w4a4", "law chen2505-w4a4: has no A, B, E, so it predicts no loss"),
        ("chen2505-w4a4", "it serves Law.training_delta of the library alone"),
        ("none.json", "error: law none.json: no such file; give one that launcher/fit.py wrote"),
        ("broken", "give a law.json of launcher/fit.py"),
    ],
)
def test_plan_refuses_a_law_that_is_none(run: Run, tiny_config: Path, tmp_path: Path, law: str, words: str) -> None:
    name = str(write(tmp_path / "law.json", ['{"form": "precision"}'])) if law == "broken" else law
    code, output, errors = run(plan.main, "--config", tiny_config, "--law", name)
    assert (code, output) == (2, "")
    assert words in errors


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
