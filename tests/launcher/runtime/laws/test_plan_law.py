"""`plan.py --law`: what a law predicts for a configuration, and where it says nothing."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plumbline.launcher import fit, plan
from plumbline.launcher.runtime.laws import prediction
from plumbline.launcher.runtime.laws.document import open_law
from plumbline.launcher.runtime.laws.rows import layout_of
from plumbline.model.quantization.precision import PrecisionConfig
from plumbline.model.scaling_laws.points import points
from plumbline.model.scaling_laws.published import KUMAR, published
from plumbline.model.scaling_laws.variants import FloatLaw, GranularityLaw
from tests.launcher.runtime.laws.conftest import ROW, synthetic, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Command
    from tests.launcher.runtime.laws.conftest import Run

CHINCHILLA = ("A", "B", "E", "alpha", "beta")
FORMATS = [(8, "e4m3"), (6, "e2m3"), (6, "e3m2"), (4, "e2m1")]
SIZE = (10**8, 10**8, 2 * 10**9)  # parameters, those of them in blocks, and tokens


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
