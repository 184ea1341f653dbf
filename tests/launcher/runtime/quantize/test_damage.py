"""What rounding costs: sums over sequences against formulas written out, intervals, rows that last, curves."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.quantize.curves import by_bits, by_tokens, draw_curves, outlier_lines, spearman
from plumbline.launcher.runtime.quantize.damage import SequenceSums, compare, damage
from plumbline.launcher.runtime.quantize.report import predicted_delta, table, write_report
from plumbline.launcher.runtime.quantize.row import Row
from plumbline.launcher.runtime.quantize.rows import LAYERS, ROWS, SUPERSEDED, RowFile, read_rows
from plumbline.model.quantization.post_training.report import LayerReport
from plumbline.model.scaling_laws.published import published

VOCABULARY = 11
LAYER = LayerReport("layers.0.up", (4, 8), 4.5, 0.1, math.inf, 2.0, 3.0, 9.0, 1.5)


class Table(nn.Module):
    """Predict from the last token alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        logits = 3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        self.logits = nn.Parameter(logits)
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=64)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits[input_ids])


def loaded(seed: int) -> LoadedModel:
    return LoadedModel(Table(seed), Path("table"), None, None, None, None)


class Text:
    """Stand for a split of nothing but a name; two bits of a token's loss are one of a byte's."""

    name = "text"

    def bits_per_byte(self, loss: float) -> float | None:
        return loss / math.log(2) / 2


def batches(sequences: int = 6, length: int = 9) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (sequences, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 4:] = -100
    labels[-1] = -100
    inputs = {"input_ids": tokens[:, :-1], "labels": labels}
    return [{name: tensor[rows] for name, tensor in inputs.items()} for rows in (slice(0, 4), slice(4, None))]


def test_sums_of_each_sequence_are_those_of_its_labelled_tokens() -> None:
    base, other = loaded(0), loaded(1)
    sums = compare(base, other, batches())
    rows = []
    for batch in batches():
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            row = [0.0] * 5
            for token, label in zip(inputs.tolist(), labels.tolist(), strict=True):
                if label >= 0:
                    before, after = (
                        model.module.logits[token].double().log_softmax(-1).tolist()  # type: ignore[index]
                        for model in (base, other)
                    )
                    row[0] += 1
                    row[1] -= before[label]
                    row[2] -= after[label]
                    row[3] += sum(math.exp(p) * (p - q) for p, q in zip(before, after, strict=True))
                    row[4] += before.index(max(before)) == after.index(max(after))
            rows.append(row)
    assert rows[-1] == [0.0] * 5, "a row that only fills up the batch"
    columns = torch.tensor(rows[:-1], dtype=torch.float64).T
    names = ("tokens", "base_nats", "nats", "divergence", "agreements")
    for name, expected in zip(names, columns, strict=True):
        torch.testing.assert_close(getattr(sums, name), expected, rtol=1e-5, atol=1e-5, msg=name)


def test_damage_is_per_token_over_all_sequences() -> None:
    sums = compare(loaded(0), loaded(1), batches())
    found = damage(sums, Text())  # type: ignore[arg-type]
    tokens = float(sums.tokens.sum())
    assert found.predicted_tokens == tokens == 4 + 4 * 9
    assert found.sequences == 5
    assert found.loss == pytest.approx(float(sums.nats.sum()) / tokens)
    assert found.delta == pytest.approx(found.loss - found.base_loss)
    assert found.delta_interval[0] < found.delta < found.delta_interval[1]
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) / 2)
    assert found.kl > 0
    assert 0 < found.agreement < 1


def test_a_model_does_itself_no_damage() -> None:
    found = damage(compare(loaded(0), loaded(0), batches()), Text())  # type: ignore[arg-type]
    assert (found.delta, found.delta_interval, found.kl, found.agreement) == (0.0, (0.0, 0.0), 0.0, 1.0)


def test_the_interval_is_of_differences_not_of_losses() -> None:
    """Sequences of very different losses, all of them harmed alike: nothing is uncertain."""
    tokens = torch.full((40,), 10.0, dtype=torch.float64)
    base = torch.linspace(1, 900, 40, dtype=torch.float64)
    same = damage(SequenceSums(tokens, base, base + 2.0, tokens, tokens), Text())  # type: ignore[arg-type]
    assert same.delta_interval == pytest.approx((0.2, 0.2))
    uneven = base + torch.arange(40) % 2 * 4.0
    found = damage(SequenceSums(tokens, base, uneven, tokens, tokens), Text())  # type: ignore[arg-type]
    half = 1.96 * 0.2 / math.sqrt(40)
    assert found.delta == pytest.approx(0.2)
    assert found.delta_interval == pytest.approx((0.2 - half, 0.2 + half), abs=0.015)


def test_the_interval_is_that_of_2000_samples_drawn_at_once() -> None:
    tokens = torch.arange(1, 10, dtype=torch.float64)
    harm = torch.tensor([0.1, 0.7, -0.2, 3.0, 0.0, 1.0, -4.0, 9.0, 2.0], dtype=torch.float64)
    drawn = torch.randint(9, (2000, 9), generator=torch.Generator().manual_seed(0))
    means = harm[drawn].sum(1) / tokens[drawn].sum(1)
    found = damage(SequenceSums(tokens, tokens, tokens + harm, tokens, tokens), Text())  # type: ignore[arg-type]
    assert found.delta_interval == pytest.approx(means.quantile(torch.tensor([0.025, 0.975]).double()).tolist())


def test_one_sequence_has_no_interval() -> None:
    one = torch.ones(1, dtype=torch.float64)
    found = damage(SequenceSums(one, one, one + 0.5, one, one), Text())  # type: ignore[arg-type]
    assert found.delta == 0.5
    assert all(map(math.isnan, found.delta_interval))
    assert "| +0.5000 | - |" in table([row(delta=0.5, delta_interval=(math.nan, math.nan))])[2]


def test_longer_sequences_count_for_more() -> None:
    """Harmed by the same for each token, whatever their lengths: nothing is uncertain."""
    tokens = torch.linspace(1, 100, 40, dtype=torch.float64)
    found = damage(SequenceSums(tokens, tokens, 1.5 * tokens, tokens, tokens), Text())  # type: ignore[arg-type]
    assert found.delta_interval == pytest.approx((0.5, 0.5))


def test_no_tokens_are_no_result() -> None:
    with pytest.raises(ValueError, match="text: no token to predict"):
        damage(SequenceSums(*torch.zeros(5, 3, dtype=torch.float64)), Text())  # type: ignore[arg-type]


def row(recipe: str = "rtn-w4", delta: float = 0.1, **changes: Any) -> Row:
    """Return a row with other values where they are given, by their keys in rows.jsonl."""
    return Row.from_json(
        {
            "key": "0123456789abcdef",
            "model": "runs/a/checkpoints/step_1",
            "run": "runs/a",
            "average": None,
            "step": 1,
            "parameters": 500,
            "tokens": 1000,
            "tokens_per_parameter": 2.0,
            "lr": 0.01,
            "lr_phase": "decay",
            "lr_factor": 0.1,
            "weight_bits": 16,
            "activation_bits": 16,
            "kv_bits": 16,
            "data": "text",
            "data_fingerprint": "fedcba",
            "sequence_length": 32,
            "batch_size": 8,
            "max_batches": None,
            "calibration_sequences": 0,
            "recipe": recipe,
            "post": {"name": recipe},
            "post_bits": 4,
            "post_activation_bits": None,
            "post_kv_bits": None,
            "base_loss": 2.0,
            "loss": 2.0 + delta,
            "delta": delta,
            "delta_interval": [delta - 0.01, delta + 0.01],
            "perplexity": 8.0,
            "bits_per_byte": None,
            "kl": 0.01,
            "agreement": 0.9,
            "predicted_tokens": 1000,
            "sequences": 10,
            "stored_bits": 4.25,
            "seconds": 1.0,
            "sqnr_least": 20.0,
            "kurtosis_mean": 2.5,
            "mmr_mean": 6.0,
            "kurtosis_largest": 3.0,
            "mmr_largest": 9.0,
            "noise_floor": 0.001,
            **changes,
        }
    )


# As it was written before rows were dataclasses
LINE = (
    '{"key": "0123456789abcdef", "model": "runs/a", "run": "runs/a", "average": null, "step": 20, "parameters": 500, '
    '"tokens": 1000, "tokens_per_parameter": 2.0, "lr": 0.01, "lr_phase": "decay", "lr_factor": 0.1, "weight_bits": '
    '16, "activation_bits": 16, "kv_bits": 16, "data": "text", "data_fingerprint": "fedcba", "sequence_length": 32, '
    '"batch_size": 8, "max_batches": 3, "calibration_sequences": 8, "recipe": "rtn-w4", "post": {"name": "rtn-w4", '
    '"weights": {"format": "int4"}}, "post_bits": 4, "post_activation_bits": null, "post_kv_bits": null, "base_loss": '
    '2.0, "loss": 2.1, "delta": 0.1, "delta_interval": [0.09, 0.11], "perplexity": 8.0, "bits_per_byte": 1.5, "kl": '
    '0.01, "agreement": 0.9, "predicted_tokens": 1000, "sequences": 10, "stored_bits": 4.25, "seconds": 1.0, '
    '"sqnr_least": 20.0, "kurtosis_mean": 2.5, "mmr_mean": null, "kurtosis_largest": 3.0, "mmr_largest": null, '
    '"noise_floor": 0.001}'
)


def test_a_row_is_read_and_written_as_ever() -> None:
    found = Row.from_json(json.loads(LINE))
    assert json.dumps(found.to_json()) == LINE
    assert found.checkpoint.lr_phase == "decay"
    assert found.damage.delta_interval == (0.09, 0.11)
    noiseless = replace(found, rounding=replace(found.rounding, sqnr_least=math.inf))
    assert noiseless.to_json()["sqnr_least"] is None, "JSON has no infinity"


def test_rows_of_others_stay_as_they_are(tmp_path: Path) -> None:
    """A key that we do not know is kept; a line without one that we need is named, and nothing is written."""
    line = LINE[:-1] + ', "mine": [1]}\n'
    (tmp_path / ROWS).write_text(line)
    assert [each.recipe for each in RowFile(tmp_path).rows] == ["rtn-w4"]
    assert (tmp_path / ROWS).read_text() == line
    broken = line + line.replace('"kl"', '"k"')
    (tmp_path / ROWS).write_text(broken)
    with pytest.raises(
        ValueError, match=r"rows.jsonl, line 2: cannot be read: 'kl' is missing; it is no row of quantize.py"
    ):
        RowFile(tmp_path)
    assert (tmp_path / ROWS).read_text() == broken


def test_rows_last_and_torn_ones_are_dropped(tmp_path: Path) -> None:
    rows = RowFile(tmp_path)
    rows.add(row(key="one"), [LAYER])
    rows.add(row("rtn-w3", key="two"), [LAYER, replace(LAYER, name="layers.0.down")])
    whole = (tmp_path / ROWS).read_text()
    (tmp_path / ROWS).write_text(whole[: len(whole) - 20])  # as a crash leaves it
    again = RowFile(tmp_path)
    assert "one" in again
    assert "two" not in again, "to be measured again"
    assert [json.loads(line)["key"] for line in (tmp_path / LAYERS).read_text().splitlines()] == ["one"]
    again.add(row("rtn-w3", key="two"), [LAYER])
    assert [each.recipe for each in RowFile(tmp_path).rows] == ["rtn-w4", "rtn-w3"]
    layer = json.loads((tmp_path / LAYERS).read_text().splitlines()[0])
    assert layer["output_sqnr"] is None, "JSON has no infinity"
    assert {key: layer[key] for key in ("name", "input_mmr")} == {"name": "layers.0.up", "input_mmr": 9.0}
    assert asdict(LAYER).keys() <= layer.keys()


@pytest.mark.parametrize("name", [ROWS, LAYERS])
def test_the_torn_line_of_another_process_is_not_continued(tmp_path: Path, name: str) -> None:
    RowFile(tmp_path).add(row(key="one"), [LAYER])
    rows = RowFile(tmp_path)
    with (tmp_path / name).open("a") as file:
        file.write('{"key": "tw')  # as another process that is killed leaves it
    rows.add(row("rtn-w3", key="three"), [LAYER])
    assert [each.key for each in RowFile(tmp_path).rows] == ["one", "three"]
    assert [json.loads(line)["key"] for line in (tmp_path / LAYERS).read_text().splitlines()] == ["one", "three"]


def test_layers_without_any_row_are_dropped(tmp_path: Path) -> None:
    """As the first row leaves them if it is killed between the two files; it is measured again."""
    RowFile(tmp_path).add(row(key="one"), [LAYER])
    (tmp_path / ROWS).unlink()
    RowFile(tmp_path).add(row(key="one"), [LAYER])
    assert len((tmp_path / LAYERS).read_text().splitlines()) == 1


def test_what_two_processes_measured_at_once_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for process in RowFile(tmp_path), RowFile(tmp_path):
        process.add(row(key="one"), [LAYER])
    assert [each.key for each in RowFile(tmp_path).rows] == ["one"]
    for name in (ROWS, LAYERS):
        assert len((tmp_path / name).read_text().splitlines()) == 1
    assert not (tmp_path / SUPERSEDED).exists()
    assert "changed" not in capsys.readouterr().err


def test_a_row_gives_way_to_a_later_one_of_the_same_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights trained anew, a recipe edited under its name, a text prepared anew: each makes another key."""
    rows = RowFile(tmp_path)
    rows.add(row(key="old", lr=0.1), [LAYER])
    rows.add(row("rtn-w3", key="other"), [LAYER])
    rows.add(row(key="ema", average="ema"), [LAYER])
    assert not (tmp_path / SUPERSEDED).exists()
    with (tmp_path / ROWS).open("a") as file:  # as a crash leaves it before the earlier one has moved
        file.write(json.dumps({**row(key="new", data_fingerprint="abcdef", base_loss=1.9).to_json(), "mine": 1}) + "\n")
    assert [each.key for each in read_rows(tmp_path)] == ["other", "ema", "new"]
    rows = RowFile(tmp_path)
    rows.add(row(key="newest", post={"name": "rtn-w4", "static": True}), [LAYER, replace(LAYER, name="layers.0.down")])
    assert "old" not in rows
    for read in (rows.rows, RowFile(tmp_path).rows):
        assert [each.key for each in read] == ["other", "ema", "newest"]
    moved = [json.loads(line) for line in (tmp_path / SUPERSEDED).read_text().splitlines()]
    assert [(each["key"], each["lr"], each.get("mine")) for each in moved] == [("old", 0.1, None), ("new", 0.01, 1)]
    layers = [json.loads(line)["key"] for line in (tmp_path / LAYERS).read_text().splitlines()]
    assert layers == ["other", "ema", "newest", "newest"]


def test_curves_compare_like_with_like() -> None:
    rows = [
        row("rtn-w4-g32", 0.1),
        row("rtn-w3-g32", 0.3, post_bits=3),
        row("gptq-w4", 0.05),
        row("w4a8-token", 0.4, post_activation_bits=8),
        row("mxfp4-w", 0.2),
        row("gptq-w4", 0.02, model="runs/b/checkpoints/step_9", tokens_per_parameter=1.0),
    ]
    assert by_bits(rows) == {"rtn-w-g32, a/step_1": [(3, 0.3), (4, 0.1)]}
    assert by_bits(rows[:-1]) == {"rtn-w-g32": [(3, 0.3), (4, 0.1)]}
    assert by_tokens(rows) == {"gptq-w4": [(1.0, 0.02), (2.0, 0.05)]}
    assert by_tokens([rows[0], row("rtn-w4-g32", 0.2)]) == {}, "two models of one age are no curve"
    assert spearman([(1, 2), (2, 5), (9, 7)]) == pytest.approx(1.0)
    assert spearman([(1, 7), (2, 5), (9, 2)]) == pytest.approx(-1.0)
    assert math.isnan(spearman([(1, 7), (1, 5)]))


def test_curves_take_any_name_of_a_recipe() -> None:
    """A YAML file may name a recipe with hyphens that nothing stands between."""
    rows = [row(name, bits / 10, post_bits=bits) for name in ("mine-", "a--b") for bits in (3, 4)]
    assert by_bits(rows) == {name: [(3, 0.3), (4, 0.4)] for name in ("mine-", "a--b")}


def test_curves_keep_texts_and_averages_apart() -> None:
    rows = [
        row(recipe, delta, post_bits=bits, **changes)
        for changes, more in (({}, 0.0), ({"max_batches": 1}, 1.0), ({"average": "ema"}, 2.0))
        for recipe, bits, delta in (("rtn-w3", 3, more + 0.3), ("rtn-w4", 4, more + 0.1))
    ]
    assert [sorted(points) for points in by_bits(rows).values()] == [
        [(3, more + 0.3), (4, more + 0.1)] for more in (0.0, 1.0, 2.0)
    ]
    assert len(by_bits(rows)) == 3
    ages = [
        row("rtn-w4", age, tokens_per_parameter=age, **changes)
        for age in (1.0, 2.0)
        for changes in ({}, {"max_batches": 1})
    ]
    assert list(by_tokens(ages).values()) == [[(1.0, 1.0), (2.0, 2.0)]] * 2


def test_outliers_are_compared_within_a_recipe_over_models(tmp_path: Path) -> None:
    """Fewer bits cost more whatever the outliers; a run and its export are one model."""
    models = [(2.1, 5.0, 0.1), (2.2, 7.0, 0.3), (2.3, 6.0, 0.2), (2.4, math.inf, 0.5)]

    def of(recipe: str, more: float, models: list[tuple[float, float, float]]) -> list[Row]:
        return [
            row(recipe, more + delta, model=f"m{loss}", base_loss=loss, mmr_largest=mmr, post_activation_bits=8)
            for loss, mmr, delta in models
        ]

    rows = [*of("w8a8-token", 0.0, models), *of("w4a4-token", 1.0, models[:2])]
    rows += [row("w4a4-token", 0.3, model="export", base_loss=2.1 + 1e-8, mmr_largest=5.0, post_activation_bits=8)]
    assert outlier_lines(rows, "mmr") == {"w8a8-token": [(5.0, 0.1), (6.0, 0.2), (7.0, 0.3)]}
    report = write_report(rows, tmp_path).read_text()
    line = "- w8a8-token: the largest mmr of a layer's input against the loss added, Spearman +1.00 over 3 models"
    assert [each for each in report.splitlines() if "Spearman" in each] == [line], "and all of one kurtosis"


def test_a_table_puts_the_least_damage_first_and_marks_noise() -> None:
    kv4 = row("kv4", 0.2, stored_bits=None, sqnr_least=None)
    lines = table([row("bad", 0.5), row("none", -0.0004), kv4, row("helps", -0.2)])
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["helps", "none", "kv4", "bad"]
    assert "| -0.2000 |" in lines[2]
    assert "| (-0.0004) |" in lines[3]
    assert "| +0.2000 | +0.1900 to +0.2100 |" in lines[4]
    assert "|  | +0.2000" in lines[4]


def test_a_row_that_is_not_finite_is_read_and_comes_last(tmp_path: Path) -> None:
    lost = row("rtn-w2", math.nan, loss=math.nan, perplexity=math.inf, delta_interval=(math.nan, math.nan))
    found = Row.from_json(json.loads(json.dumps(lost.to_json(), allow_nan=False)))
    assert math.isnan(found.damage.delta)
    rows = [found, row("rtn-w3", 0.4), row("rtn-w4", 0.1)]
    assert [line.split(" | ")[0] for line in table(rows)[2:]] == ["| rtn-w4", "| rtn-w3", "| rtn-w2"]
    assert list(by_bits(rows).values()) == [[(4, 0.1), (4, 0.4)]]
    write_report(rows, tmp_path, None)


def test_rows_of_other_texts_stand_apart(tmp_path: Path) -> None:
    rows = [row(delta=0.1), row(delta=0.2, sequence_length=64, base_loss=1.5), row(delta=0.3, average="ema")]
    report = write_report(rows, tmp_path).read_text()
    assert report.count("## runs/a/checkpoints/step_1") == 3
    anew = [*rows, row("rtn-w3", base_loss=1.99), row("rtn-w2", data_fingerprint="other")]
    assert write_report(anew, tmp_path).read_text().count("## runs/a/checkpoints/step_1") == 5, (
        "other weights, and text"
    )
    assert "## runs/a/checkpoints/step_1, ema" in report
    assert "loss 1.5000 nats per token on 1,000 tokens of text in 10 sequences of 64" in report


def test_a_report_needs_no_more_than_one_row(tmp_path: Path) -> None:
    report = write_report([row(tokens=None, tokens_per_parameter=None, lr_phase=None)], tmp_path).read_text()
    assert "## runs/a/checkpoints/step_1" in report
    assert "noise floor 1.0e-03" in report
    assert "learning rate" not in report
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_law_predicts_what_rounding_weights_alone_costs() -> None:
    law = published("kumar2411").law
    found = predicted_delta(law, row(parameters=30_000_000, tokens=26_000_000_000, post_bits=4))
    assert found == pytest.approx(0.108, abs=0.001), "30M parameters, 26B tokens, 4 bits"
    for outside in ({"post_activation_bits": 8}, {"tokens": None}, {"weight_bits": 6}, {"kv_bits": 4, "post_bits": 4}):
        assert predicted_delta(law, row(**outside)) is None, outside  # of weight_bits 6: C_w was not published
    power = published("ouyang2411").law
    assert predicted_delta(power, row()) == pytest.approx(0.017 * 1000**0.5251 / 500**0.2261 / 4**5.4967)
    assert predicted_delta(power, row(activation_bits=8)) is None, "it is of models trained in bf16"


@pytest.mark.parametrize(("name", "note"), [(None, "no law was given: --law"), ("kumar2411", "the law covers none")])
def test_a_law_that_covers_no_row_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None, note: str
) -> None:
    figures = list[Figure]()
    monkeypatch.setattr("plumbline.launcher.runtime.quantize.curves.save_png", lambda figure, _: figures.append(figure))
    write_report([row(tokens=None, tokens_per_parameter=None)], tmp_path, None if name is None else published(name).law)
    (said,) = (each.get_text() for each in figures[0].axes[3].texts)
    assert said.startswith(note)


def test_curves_of_every_kind_are_drawn(tmp_path: Path) -> None:
    rows = [
        row(
            delta=delta,
            post_bits=bits,
            tokens_per_parameter=bits,
            post_activation_bits=other,
            kurtosis_largest=2 * bits,
            base_loss=bits,
        )
        for bits, delta in ((2, 0.5), (3, 0.2), (4, -0.01))
        for other in (None, 8)
    ]
    draw_curves(rows, [(0.1, each.damage.delta) for each in rows], 0.001, tmp_path / "all.png")
    draw_curves([], None, 0.001, tmp_path / "none.png")
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "none.png").stat().st_size > 10_000
