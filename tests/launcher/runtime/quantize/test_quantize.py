"""quantize.py as users run it: rows for runs, checkpoints and Hugging Face folders; folders that transformers loads."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from plumbline.launcher.quantize import main
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.export.verify import check_tokens
from plumbline.launcher.runtime.laws.rows import read_rows
from plumbline.launcher.runtime.models.open import load_model, load_tokenizer
from plumbline.launcher.runtime.quantize import save
from plumbline.launcher.runtime.quantize.facts import checkpoint_facts
from plumbline.launcher.runtime.quantize.rows import RowFile, in_bf16, measure_missing
from plumbline.launcher.runtime.quantize.rows import read_rows as read_rows_of
from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.recipes import SETS, Recipe, named_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Command

    Quantize = Callable[..., Any]

SMALL = ("--max-batches", "3", "--calibration-sequences", "8", "--device", "cpu")


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], corpus: Path) -> Quantize:
    """Return a function that runs the command in this process, for what it prints with --json.

    Curves are left undrawn: matplotlib takes longer than the rounding, and test_damage.py looks at them.
    """
    monkeypatch.setattr("plumbline.launcher.runtime.quantize.report.draw_curves", lambda *given: given[-1].touch())

    def run(*arguments: str | Path) -> Any:
        words = ["quantize.py", "--data", corpus, *SMALL, "--json", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        main()
        return json.loads(capsys.readouterr().out)

    return run


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
    facts = [checkpoint_facts(load_model(step, cpu)) for step in sorted((trained / "checkpoints").glob("step_*"))]
    assert [(each.step, each.lr_phase) for each in facts] == [(10, "peak"), (20, "decay")]
    assert facts[0].lr_factor == 1.0
    assert facts[1].lr_factor is not None
    assert 0 < facts[1].lr_factor < 0.5
    assert (facts[1].weight_bits, facts[1].activation_bits, facts[1].kv_bits) == (16, 16, 16)


def test_a_run_that_was_moved_is_not_taken_for_the_one_in_its_old_place(trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "archive"
    shutil.copytree(trained, moved)
    facts = [checkpoint_facts(load_model(run, torch.device("cpu"))) for run in (trained, moved)]
    assert [each.run for each in facts] == [str(trained), str(moved / "checkpoints" / "step_00000020")]


def test_rows_that_another_process_adds_meanwhile_are_reported(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "q"

    def measure(*given: Any) -> None:
        other = RowFile(folder)
        measure_missing(*given)
        row = read_rows_of(folder)[0]
        other.add(replace(row, key="another", recipe="theirs"), [])

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


@pytest.mark.parametrize(
    ("recipe", "container", "rounded_error", "loss_error"),
    [
        ("gptq-w4-g32", "pack-quantized", 1e-5, 1e-6),
        ("rtn-w3-hadamard", "pack-quantized", 1e-5, 1e-7),
        ("fp8-e4m3-row", "float-quantized", 1e-5, 1e-7),
        ("w8a8-token", "int-quantized", 0.05, 1e-5),
        ("w8a8-static", "int-quantized", 1e-5, 1e-7),
        ("w8a8-static-asym-p99.999-wtensor", "int-quantized", 1e-5, 1e-7),
    ],
)
def test_a_saved_folder_computes_what_was_measured(
    quantize: Quantize,
    trained: Path,
    tmp_path: Path,
    recipe: str,
    container: str,
    rounded_error: float,
    loss_error: float,
) -> None:
    pytest.importorskip("compressed_tensors")
    saved = tmp_path / "saved"
    report = quantize("--model", trained, "--recipes", recipe, "--save", saved)
    assert report["format"] == container
    assert report["relative_error"] <= 1e-5, "the weights are exactly those that were measured"
    assert report["rounded_error"] <= rounded_error
    config = json.loads((saved / "config.json").read_text())
    assert config["quantization_config"]["format"] == container
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "which older readers look for"
    # Rounding to 16 bits harms nothing: its base_loss is the saved folder's own
    again = quantize("--model", saved, "--recipes", "kv16-token", "--output", tmp_path / "again")
    measured = quantize("--model", trained, "--recipes", recipe, "--output", tmp_path / "q")
    assert again[0]["base_loss"] == pytest.approx(measured[0]["loss"], abs=loss_error)
    groups = config["quantization_config"]["config_groups"]
    assert (groups["group_0"]["input_activations"] is not None) == (measured[0]["post_activation_bits"] is not None)
    if loss_error == 1e-7:
        assert abs(measured[0]["delta"]) > 10 * loss_error, "a folder that rounds nothing has another loss"
    assert again[0]["parameters"] == pytest.approx(measured[0]["parameters"], rel=2e-3), "no scales; a run's: last norm"
    with pytest.raises(ValueError, match=r"recipe rtn-w8: the model is quantized already \(quantization_config"):
        quantize("--model", saved, "--recipes", "rtn-w8", "--save", tmp_path / "twice")
    assert load_tokenizer(saved).model_max_length == config["max_position_embeddings"]
    modes = {file.stat().st_mode for file in (*saved.glob("*.safetensors"), tmp_path / "q" / "rows.jsonl")}
    assert len(modes) == 1, "the umask decides"
    assert not list(tmp_path.glob(".saved*")), "nothing is left beside it"


@pytest.mark.parametrize(("recipe", "same"), [("rtn-w4-g32", True), ("rtn-w3-g32", False)])
def test_a_folder_that_would_be_another_model_than_was_measured_is_refused(
    trained: Path, recipe: str, same: bool
) -> None:
    """Here that of another recipe; a run's factors, folded into what a scale is for, make one as well."""
    module = load_model(trained, torch.device("cpu")).module
    assert isinstance(module, CausalLM)
    stock = deepcopy(module)
    quantize_model(stock, named_recipe(recipe), [])
    expected = stock(check_tokens(module.config)).detach()
    refused = nullcontext() if same else pytest.raises(ExportError, match=r"Export the run .* and save that")
    with refused:
        save._compare_with_measured(module, named_recipe("rtn-w4-g32"), [], expected)


def test_every_save_is_compared_with_what_is_measured(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MEASURED", -1.0)
    with pytest.raises(ExportError, match="makes another model"):
        quantize("--model", trained, "--recipes", "rtn-w4", "--save", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_saved_folder_has_the_whole_tokenizer(quantize: Quantize, exported_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder, names = tmp_path / "chats", ["chat_template.jinja", "additional_chat_templates/tools.jinja"]
    names += ["vocab.json", "merges.txt", "spm.model", "tekken.json"]
    shutil.copytree(exported_folder, folder)
    (folder / "additional_chat_templates").mkdir()
    for name in names:
        (folder / name).write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "document_mask": True}))
    quantize("--model", folder, "--recipes", "rtn-w4", "--save", tmp_path / "saved")
    assert [name for name in names if not (tmp_path / "saved" / name).is_file()] == []
    assert load_tokenizer(tmp_path / "saved").chat_template == {"default": "{}", "tools": "{}"}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["document_mask"], "which eval.py looks for"


def test_what_a_killed_save_left_is_removed_by_the_next(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    left = tmp_path / ".saved.0123abcd.partial"
    (left / "plain").mkdir(parents=True)
    write, filled = save._write, list[str]()

    def note(*arguments: Any) -> None:
        filled.extend(path.name for path in tmp_path.glob(".saved*"))
        write(*arguments)

    monkeypatch.setattr(save, "_write", note)
    quantize("--model", trained, "--recipes", "rtn-w4", "--save", tmp_path / "saved")
    assert len(filled) == 1, "the one that was left is gone"
    assert re.fullmatch(r"\.saved\.[0-9a-f]+\.partial", filled[0]), "the next command knows it by its name"
    assert not list(tmp_path.glob(".saved*"))
    assert not [path for path in (tmp_path / "saved").iterdir() if path.is_dir()]


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


def test_models_that_no_quantized_folder_can_hold(
    quantize: Quantize, trained: Path, command: Command, tmp_path: Path
) -> None:
    """GPT-2 in transformers is no nn.Linear; a native export is no stock class."""
    pytest.importorskip("compressed_tensors")
    config = GPT2Config(vocab_size=257, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    done = command("export", "--model", trained, "--output", tmp_path / "native", "--target", "native")
    assert done.returncode == 0, done.stderr
    for name, reason in (("gpt2", "is made of Conv1D layers"), ("native", "no stock class computes this model")):
        with pytest.raises(ValueError, match=rf"{name}: .*{reason}"):
            quantize("--model", tmp_path / name, "--recipes", "rtn-w4", "--save", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_recipes_of_a_set_that_do_not_fit_are_left_out(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS, "weights", ("rtn-w4-g128", "rtn-w8"))
    rows = quantize("--model", trained, "--recipes", "weights", "--output", tmp_path)
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
    [("--recipes kv4 --save OUT", "does not round weights"), ("--recipes rtn-w4 --save .", "exists; choose another")],
)
def test_what_cannot_be_saved_is_refused_before_the_model_is_read(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setattr("plumbline.launcher.quantize.load_model", lambda *_: pytest.fail("a model was read"))
    with pytest.raises(ValueError, match=message):
        quantize("--model", trained, *arguments.replace("OUT", str(tmp_path / "out")).split())


def test_the_command_line_lists_recipes_and_says_what_is_missing(command: Command) -> None:
    done = command("quantize", "--list")
    assert done.returncode == 0
    assert "gptq-wB" in done.stdout
    assert "\nw8a8: w8a8-static" in done.stdout
    done = command("quantize", "--model", ".")
    assert done.returncode == 2
    assert done.stderr.endswith("error: missing: --data, --recipes, --output (or --save); --list shows the recipes\n")
