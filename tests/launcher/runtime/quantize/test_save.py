"""quantize.py --save as users run it: folders that transformers loads, and what no folder can hold."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from plumbline.launcher import export
from plumbline.launcher import quantize as quantize_command
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.export.report import ExportError
from plumbline.launcher.runtime.models import facts
from plumbline.launcher.runtime.models.open import load_tokenizer
from plumbline.launcher.runtime.quantize import save
from plumbline.model.export.targets import to_hugging_face

if TYPE_CHECKING:
    from tests.conftest import Command
    from tests.launcher.runtime.quantize.conftest import Quantize


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
    assert again[0]["parameters"] == measured[0]["parameters"], "no scales"
    with pytest.raises(ValueError, match=r"recipe rtn-w8: the model is quantized already \(quantization_config"):
        quantize("--model", saved, "--recipes", "rtn-w8", "--save", tmp_path / "twice")
    assert load_tokenizer(saved).model_max_length == config["max_position_embeddings"]
    modes = {file.stat().st_mode for file in (*saved.glob("*.safetensors"), tmp_path / "q" / "rows.jsonl")}
    assert len(modes) == 1, "the umask decides"
    assert not list(tmp_path.glob(".saved*")), "nothing is left beside it"


def test_a_folder_that_is_not_what_is_measured_is_refused(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its scales are not those that the run was rounded with."""
    pytest.importorskip("compressed_tensors")

    def coarser(*given: Any) -> Any:
        entries, weights = to_hugging_face(*given)
        return entries, {name: 1.5 * weight for name, weight in weights.items()}

    monkeypatch.setattr(save, "to_hugging_face", coarser)
    with pytest.raises(ExportError, match=r"reloaded, logits differ by .* of the largest \(allowed 1e-05\)"):
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
        filled.extend(path.name for path in tmp_path.glob(".saved*.partial"))
        write(*arguments)

    monkeypatch.setattr(save, "_write", note)
    quantize("--model", trained, "--recipes", "rtn-w4", "--save", tmp_path / "saved")
    assert len(filled) == 1, "the one that was left is gone"
    assert re.fullmatch(r"\.saved\.[0-9a-f]+\.partial", filled[0]), "the next command knows it by its name"
    assert not list(tmp_path.glob(".saved*"))
    assert not [path for path in (tmp_path / "saved").iterdir() if path.is_dir()]


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("precision.activations=8", r"precision.activations: this run rounds them to int8 \(tensor"),
        ("precision.kv_cache=8", r"precision.kv_cache: this run rounds them to int8 \(tensor"),
        ("model.attention_sink=true", "no stock class computes this model"),
        ("model.attention=pruned", "--target native cannot hold model.attention = pruned"),
        ("--target=llame", "--target llame: unknown; known targets: auto, llama"),
    ],
)
def test_a_run_that_no_folder_can_hold_is_refused_before_weights_are_read(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    pytest.importorskip("compressed_tensors")
    target = override.startswith("--target")
    overrides = [] if target else [override]
    monkeypatch.setattr(facts, "config_in", lambda folder: load_config(folder / "config.yaml", overrides))
    for command in (export, quantize_command):
        monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    words = ["export.py", "--model", trained, "--output", tmp_path / "out", *([override] if target else [])]
    saving = ["quantize.py", "--model", trained, "--data", corpus, "--recipes", "rtn-w4", "--save", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    if override != "model.attention_sink=true":  # which a folder with its own code computes
        with pytest.raises(ValueError, match=message):
            export.main()
    monkeypatch.setattr(sys, "argv", list(map(str, saving)))
    if not target:
        with pytest.raises(ValueError, match=message):
            quantize_command.main()


def test_a_saved_folder_warns_of_readers_that_compute_something_else(
    quantize: Quantize, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr("plumbline.launcher.runtime.export.hugging_face.unread_entries", lambda *_: ("hidden_act: x",))
    report = quantize("--model", trained, "--recipes", "rtn-w4", "--save", tmp_path / "saved")
    (caution,) = report["cautions"]
    assert caution.startswith("config.json has hidden_act: x, which transformers reads")
