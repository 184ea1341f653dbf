"""quantize.py as users run it: rows for runs, checkpoints and Hugging Face folders."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from plumbline.launcher.quantize import parse_arguments
from plumbline.launcher.runtime.export.verify import check_tokens
from plumbline.launcher.runtime.laws.rows import read_rows
from plumbline.launcher.runtime.models.open import LoadedModel, load_model
from plumbline.launcher.runtime.quantize import rows
from plumbline.launcher.runtime.quantize.facts import checkpoint_facts
from plumbline.launcher.runtime.quantize.row import TextSettings
from plumbline.launcher.runtime.quantize.rows import RowFile, in_bf16, measure_missing
from plumbline.launcher.runtime.quantize.rows import read_rows as read_rows_of
from plumbline.model.quantization.post_training.recipes import SETS, Recipe, named_recipe

if TYPE_CHECKING:
    from tests.conftest import Command
    from tests.launcher.runtime.quantize.conftest import Quantize


def test_rows_of_many_checkpoints_and_recipes(quantize: Quantize, trained: Path, tmp_path: Path) -> None:
    """Each is measured once; the second command adds what is new."""
    steps = sorted((trained / "checkpoints").glob("step_*"))
    assert len(steps) >= 2
    measure = partial(quantize, "--model", *steps, "--output", tmp_path / "q", "--recipes", "rtn-w2", "w8a8-token")
    first = measure()
    assert [(row["step"], row["recipe"]) for row in first] == [
        (int(step.name.split("_")[1]), recipe) for step in steps for recipe in ("rtn-w2", "w8a8-token")
    ]
    more = measure("kv3")
    assert more[: len(first)] == first
    assert [row["recipe"] for row in more[len(first) :]] == ["kv3"] * len(steps)

    last = {row["recipe"]: row for row in more if row["step"] == max(row["step"] for row in more)}
    assert last["rtn-w2"]["delta"] > 10 * abs(last["w8a8-token"]["delta"])
    assert [last[name]["post_bits"] for name in ("rtn-w2", "w8a8-token", "kv3")] == [2, 8, None]
    assert (last["w8a8-token"]["post_activation_bits"], last["kv3"]["post_kv_bits"]) == (8, 3)
    assert 2 < last["rtn-w2"]["stored_bits"] < 3
    assert last["rtn-w2"]["lr_phase"] == "decay"
    assert last["rtn-w2"]["tokens_per_parameter"] == last["rtn-w2"]["tokens"] / last["rtn-w2"]["parameters"]
    layers = [json.loads(line) for line in (tmp_path / "q" / "layers.jsonl").read_text().splitlines()]
    assert len(layers) == len(steps) * 2 * 14, "two recipes round layers, seven in each of two blocks"
    assert (tmp_path / "q" / "curves.png").is_file()
    assert "| rtn-w2 |" in (tmp_path / "q" / "report.md").read_text()

    assert [row["run"] for row in first] == [str(steps[0])] * 2 + [str(trained)] * 2, "the last one is the run's own"
    law = read_rows([tmp_path / "q"])  # as fit.py reads it: each checkpoint as trained, and with its weights rounded
    assert sorted(law.measured.at.post_bits.tolist()) == [2.0] * len(steps) + [float("inf")] * len(steps)
    assert len(set(law.measured.runs.tolist())) == len(steps)
    assert sorted(law.measured.loss) == pytest.approx(
        sorted(row[key] for row in first[::2] for key in ("loss", "base_loss"))
    )
    assert sum(count for reason, count in law.left_out.items() if reason.startswith("with inputs")) == 2 * len(steps)


def test_an_export_is_harmed_as_the_run_is(
    quantize: Quantize, command: Command, trained: Path, exported_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    """The stock class has the multipliers folded into its weights, which changes scales and not what is rounded off."""
    measure = partial(quantize, "--recipes", "rtn-w2", "gptq-w2", "w8a8-token", "kv2-token")
    ours = measure("--model", trained, "--output", tmp_path / "ours")
    stock = measure("--model", exported_folder, "--output", tmp_path / "stock")
    for one, other in zip(ours, stock, strict=True):
        assert other["delta"] == pytest.approx(one["delta"], abs=1e-6), one["recipe"]
        assert other["tokens"] is None
    assert ours[0]["delta"] > 0.005
    assert ours[0]["noise_floor"] > 0
    scored = command("eval", "--model", trained, "--data", corpus, "--max-batches", "3", "--json")
    assert ours[0]["base_loss"] == pytest.approx(json.loads(scored.stdout)["loss"], abs=1e-5)


def test_the_noise_floor_is_of_the_folder_as_bf16_opens_it(exported_folder: Path) -> None:
    """Which leaves the rotary frequencies in fp32."""
    exact, opened = (
        load_model(exported_folder, torch.device("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    batch = {"input_ids": check_tokens(exact.module.config)}
    assert torch.equal(replace(exact, module=in_bf16(exact.module)).logits(batch), opened.logits(batch))
    assert not torch.equal(exact.logits(batch), opened.logits(batch))


def test_weights_that_changed_under_their_name_are_measured_anew(
    quantize: Quantize, exported_folder: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "model", tmp_path / "mine.yaml"
    shutil.copytree(exported_folder, folder)
    file.write_text("name: mine\nweights: {format: int4, granularity: channel}\n")
    measure = partial(quantize, "--model", folder, "--output", tmp_path / "q", "--recipes", "rtn-w2", file)
    first = measure()
    weights = load_file(folder / "model.safetensors")
    save_file({name: 0.9 * each for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    file.write_text("name: mine\nweights: {format: int3, granularity: channel}\n")
    again = measure()
    assert [row["recipe"] for row in again] == ["rtn-w2", "mine"]
    assert len({row["base_loss"] for row in again}) == 1
    assert {row["base_loss"] for row in again}.isdisjoint(row["base_loss"] for row in first)
    superseded = [json.loads(line) for line in (tmp_path / "q" / "superseded.jsonl").read_text().splitlines()]
    assert superseded == first
    assert measure() == again


def test_facts_say_where_on_its_schedule_a_checkpoint_stands(trained: Path) -> None:
    """20 steps, warm-up to 2, decay from 12."""
    cpu = torch.device("cpu")
    found = [checkpoint_facts(load_model(step, cpu)) for step in sorted((trained / "checkpoints").glob("step_*"))]
    assert [(each.step, each.lr_phase) for each in found] == [(10, "peak"), (20, "decay")]
    assert found[0].lr_factor == 1.0
    assert found[1].lr_factor is not None
    assert 0 < found[1].lr_factor < 0.5
    assert (found[1].weight_bits, found[1].activation_bits, found[1].kv_bits) == (16, 16, 16)


def test_a_folder_counts_the_parameters_of_its_run(trained: Path, exported_folder: Path) -> None:
    cpu = torch.device("cpu")
    found = [checkpoint_facts(load_model(each, cpu, torch.float32)) for each in (trained, exported_folder)]
    assert found[0].parameters == found[1].parameters


@pytest.mark.parametrize("tied", [True, False])
def test_learned_positions_are_embeddings_too(tied: bool) -> None:
    module = GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_positions=5, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=tied)
    )
    found = checkpoint_facts(LoadedModel(module, Path("gpt2"), None, None, None, None))
    parts = (module.transformer.h, module.transformer.ln_f)
    assert found.parameters == sum(each.numel() for part in parts for each in part.parameters())


def test_a_run_that_was_moved_is_not_taken_for_the_one_in_its_old_place(trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "archive"
    shutil.copytree(trained, moved)
    found = [checkpoint_facts(load_model(run, torch.device("cpu"))) for run in (trained, moved)]
    assert [each.run for each in found] == [str(trained), str(moved / "checkpoints" / "step_00000020")]


def test_rows_that_another_process_adds_meanwhile_are_reported(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "q"

    def measure(*given: Any) -> list[str]:
        other = RowFile(folder)
        failed = measure_missing(*given)
        row = read_rows_of(folder)[0]
        other.add(replace(row, key="another", recipe="theirs"), [])
        return failed

    monkeypatch.setattr("plumbline.launcher.quantize.measure_missing", measure)
    found = quantize("--model", trained, "--output", folder, "--recipes", "rtn-w4")
    assert [row["recipe"] for row in found] == ["rtn-w4", "theirs"]
    assert "| theirs |" in (folder / "report.md").read_text()


def test_a_recipe_that_computes_something_else_by_now_is_measured_again(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = partial(quantize, "--model", trained, "--output", tmp_path / "q", "--recipes", "w8a8-static-p99.999")
    with monkeypatch.context() as earlier:
        earlier.setattr(Recipe, "revision", 0)
        first = measure("w8a8-static")
    again = measure("w8a8-static")
    assert [row["recipe"] for row in again] == ["w8a8-static", "w8a8-static-p99.999"]
    superseded = [json.loads(line) for line in (tmp_path / "q" / "superseded.jsonl").read_text().splitlines()]
    assert superseded == [row for row in first if row["recipe"] == "w8a8-static-p99.999"]


def test_rows_of_what_computed_something_else_have_another_key(
    exported_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero points with scales in e4m3; keys and values of folders that keep documents apart."""
    weights = {"format": "int4", "granularity": "group", "group_size": 16, "scales": "e4m3", "symmetric": False}
    assert Recipe.model_validate({"name": "mine", "weights": weights}).revision == 1
    assert Recipe.model_validate({"name": "mine", "weights": {**weights, "symmetric": True}}).revision == 0
    masked = tmp_path / "masked"
    shutil.copytree(exported_folder, masked)
    config = json.loads((masked / "config.json").read_text())
    (masked / "config.json").write_text(json.dumps({**config, "document_mask": True}))
    monkeypatch.setattr(rows, "key_of", dict)
    settings: dict[str, Any] = dict.fromkeys((field.name for field in fields(TextSettings)), 0)
    text: Any = SimpleNamespace(settings=TextSettings(**settings))
    models = [load_model(folder, torch.device("cpu")) for folder in (exported_folder, masked)]
    found = [rows.row_key(model, named_recipe(name), text) for name in ("kv4-token", "rtn-w4") for model in models]
    assert ["revision" in each for each in found] == [False, True, False, False]


def test_a_folder_that_lost_a_weight_is_refused(exported_folder: Path, tmp_path: Path) -> None:
    """Transformers warns, and draws it at random."""
    folder = tmp_path / "broken"
    shutil.copytree(exported_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"broken: lacks 1 weights of \w+, such as model.layers.1.mlp.up_proj.weight"):
        load_model(folder, torch.device("cpu"), torch.float32)


def test_a_folder_whose_shapes_are_not_those_of_its_config_is_refused(exported_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(exported_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(ValueError, match=r"other: transformers cannot load this folder: .*mismatch"):
        load_model(folder, torch.device("cpu"), torch.float32)


def test_a_folder_whose_weights_are_cut_short_is_refused(exported_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(exported_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"cut: a file of weights is cut short or damaged; copy it again"):
        load_model(folder, torch.device("cpu"), torch.float32)


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks on the terminal whether to run it, and here somebody says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    names = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": names}))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="its model is Python code of its own"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert not (tmp_path / "ran").exists()


def test_recipes_of_a_set_that_do_not_fit_are_left_out(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the set is named in a file."""
    monkeypatch.setitem(SETS, "weights", ("rtn-w4-g128", "rtn-w8"))
    (tmp_path / "set.yaml").write_text("- weights\n")
    for given in ("weights", tmp_path / "set.yaml"):
        rows = quantize("--model", trained, "--recipes", given, "--output", tmp_path)
        assert [row["recipe"] for row in rows] == ["rtn-w8"]


def test_recipes_in_full_come_from_a_file(quantize: Quantize, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nweights: {format: e3m2, granularity: group, group_size: 16, scales: e8m0}\n")
    rows = quantize("--model", trained, "--recipes", file, "--output", tmp_path)
    assert (rows[0]["recipe"], rows[0]["stored_bits"], rows[0]["post_bits"]) == ("mine", 6.5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipes rtn-4 --output OUT", "'rtn-4' is no recipe"),
        ("--recipes WRONG --output OUT", "weight"),
        ("--recipes ENDLESS --output OUT", "1.damping = inf: a finite number is expected"),
        ("--recipes weights --save OUT", "one model and one recipe, not 1 and 9"),
        ("--recipes kv4 --save OUT", "recipe kv4 cannot be saved: it does not round weights"),
        ("--recipes rtn-w4-asym --save OUT", "cannot be saved: zero points of weights"),
        ("--recipes w8a8-dynamic --save OUT", "cannot be saved: inputs have to be static of granularity tensor, or"),
        ("--recipes POWERS --save OUT", "cannot be saved: inputs have to be static of granularity tensor, or"),
        ("--recipes w8a4-static --save OUT", "cannot be saved: its inputs are not of the 8 bits of its weights"),
        ("--recipes rtn-w4 --save .", "exists; choose another folder"),
        ("--recipes rtn-w4 --output OLD", "superseded.jsonl: exists and was not written by this command; nothing was"),
        ("--recipes rtn-w4 --output MINE", "report.md: exists and was not written by this command; nothing was"),
        ("--recipes rtn-w4 --output OUT --sequence-length 9999", "exceeds the model's"),
        ("--recipes rtn-w2 rtn-w4-g128 --output OUT", "recipe rtn-w4-g128: group_size = 128 does not divide the 64"),
        ("--recipes rtn-w4 --output OUT --average foo", "--average foo: unknown; known: ema"),
        ("--recipes rtn-w4 --output OUT --law besiroglu2404", "says nothing of quantization after training"),
    ],
)
def test_what_cannot_be_done_is_refused(
    quantize: Quantize, trained: Path, tmp_path: Path, arguments: str, message: str
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: wrong\nweight: {format: int4}\n")
    endless = tmp_path / "endless.yaml"
    endless.write_text("- rtn-w4\n- {name: endless, method: gptq, weights: {format: int4}, damping: .inf}\n")
    powers = tmp_path / "powers.yaml"
    powers.write_text(
        "name: powers\nweights: {format: int8, granularity: channel}\n"
        "activations: {format: int8, granularity: token, scales: e8m0}\n"
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.md").write_text("# Findings\n")
    old = tmp_path / "old"
    old.mkdir()
    (old / "superseded.jsonl").write_text('{"mine": 1}\n')
    files = {"OUT": tmp_path / "out", "OLD": old, "MINE": mine, "WRONG": wrong, "ENDLESS": endless, "POWERS": powers}
    words = [str(files.get(word, word)) for word in arguments.split()]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        quantize("--model", trained, *words)
    assert not list((tmp_path / "out").glob("*"))
    assert [file.read_text() for file in mine.iterdir()] == ["# Findings\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipes kv4 --save OUT", "does not round weights"),
        ("--recipes rtn-w4 --save .", "exists; choose another"),
        ("--recipes awq-w4 --save OUT", "cannot be saved: its layers divide their inputs, which no stock class does"),
        ("--recipes w8a8-token-smooth0.5 --save OUT", "cannot be saved: its layers divide their inputs"),
        ("--recipes rtn-w4-g128 --save OUT", "group_size = 128 does not divide the 64 inputs"),
        ("--recipes rtn-w4 --save OUT --sequence-length 9999", "exceeds the model's"),
        ("--recipes rtn-w4-g128 --output OUT", "group_size = 128 does not divide the 64 inputs"),
        ("--recipes rtn-w4 GROUPS.YAML --output OUT", "recipe mine: group_size = 128 does not divide the 64 inputs"),
        ("--recipes EMPTY.YAML --output OUT", "--recipes .*/empty.yaml: is empty; write a recipe or a list of them"),
        ("--recipes rtn-w4 --output FILE", "--output .*/file: .*/file is not a folder; move it away"),
        ("--recipes rtn-w4 --output FILE/q", "--output .*/q: .*/file is not a folder; move it away"),
        ("--recipes rtn-w4 --save NOWHERE", "--save .*/nowhere: exists; choose another"),
        ("--recipes rtn-w4 --save FILE/q", "--save .*/q: .*/file is not a folder; move it away"),
    ],
)
def test_what_cannot_be_done_is_refused_before_weights_are_read(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    monkeypatch.setattr("plumbline.launcher.quantize.load_model", lambda *_: pytest.fail("a model was read"))
    (tmp_path / "groups.yaml").write_text(
        "- rtn-w8\n- {name: mine, weights: {format: int4, granularity: group, group_size: 128}}\n"
    )
    (tmp_path / "empty.yaml").write_text("[]\n")
    places = {word: str(tmp_path / word.lower()) for word in ("OUT", "FILE", "NOWHERE", "GROUPS.YAML", "EMPTY.YAML")}
    words = re.sub("|".join(places), lambda found: places[found[0]], arguments).split()
    with pytest.raises(ValueError, match=message):
        quantize("--model", trained, *words)


def test_one_recipe_or_model_that_fails_leaves_the_others_measured(
    command: Command, trained: Path, corpus: Path, tmp_path: Path
) -> None:
    """Eight tokens have no moments that 1e-30 of damping would make invertible."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "- rtn-w4\n- {name: mine, method: gptq, weights: {format: int4, granularity: channel}, damping: 1.0e-30}\n"
        "- rtn-w8\n"
    )
    broken = tmp_path / "broken"
    shutil.copytree(trained / "checkpoints" / "step_00000010", broken)
    next(broken.rglob("*.safetensors")).write_bytes(b"")
    small = ("--max-batches", "1", "--calibration-sequences", "1", "--sequence-length", "8", "--device", "cpu")
    words = ("--model", broken, trained, "--data", corpus, "--recipes", file, "--output", tmp_path / "q", *small)
    done = command("quantize", *words)
    assert done.returncode == 2
    assert [row.recipe for row in read_rows_of(tmp_path / "q")] == ["rtn-w4", "rtn-w8"]
    assert "| rtn-w8 |" in (tmp_path / "q" / "report.md").read_text()
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 2, done.stderr
    assert re.search(r"not measured: .*broken is damaged", errors[0])
    assert re.search(r"not measured: recipe mine of .*trained.*: damping = 1e-30: too little", errors[1])


def test_the_command_line_lists_recipes_and_says_what_is_missing(command: Command) -> None:
    done = command("quantize", "--list")
    assert done.returncode == 0
    assert "gptq-wB" in done.stdout
    assert "\nw8a8: w8a8-static" in done.stdout
    done = command("quantize", "--model", ".")
    assert done.returncode == 2
    assert done.stderr.endswith("error: missing: --data, --recipes, --output (or --save); --list shows the recipes\n")


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--law kumar2411", "--law does nothing with --save, which measures no loss"),
        ("--batch-size 8", "--batch-size does nothing with --save, which measures no loss"),
        ("--max-batches 1", "--max-batches does nothing with --save, which measures no loss"),
        ("--device cuda", "--device cuda: --save quantizes on the CPU; leave it out"),
    ],
)
def test_options_that_save_would_ignore_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, error: str
) -> None:
    asked = f"quantize.py --model . --data . --recipes rtn-w4 --save no {option}"
    monkeypatch.setattr(sys, "argv", asked.split())
    with pytest.raises(SystemExit):
        parse_arguments()
    assert capsys.readouterr().err.splitlines()[-1] == f"quantize.py: error: {error}"
