"""Runs and checkpoints that were moved, linked or copied: what is opened and exported has its run's files with it."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from plumbline.launcher.export import main
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.optim.optimizer import parameter_groups
from plumbline.model.decoder import CausalLM
from tests.damage import reseal

CPU = torch.device("cpu")


@pytest.mark.parametrize("content", ["[1]", '{"step": 20'])
def test_a_damaged_result_is_one_error_that_names_it(trained: Path, tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "result.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^{run / 'result.json'}: "):
        export(load_model(run, CPU), tmp_path / "out", "auto")
    assert not (tmp_path / "out").exists()


def test_checkpoints_that_are_a_link_to_another_disk_are_those_of_the_run(trained: Path, tmp_path: Path) -> None:
    run, disk = tmp_path / "runs" / "run", tmp_path / "disk"
    shutil.copytree(trained, run)
    (run / "checkpoints").rename(disk)
    (run / "checkpoints").symlink_to(disk)
    export(load_model(run, CPU), tmp_path / "out", "auto")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| email/loss |" in card
    assert "| email, loss added by int8 weights and activations, nats per token |" in card
    link = tmp_path / "best"
    link.symlink_to(trained / "checkpoints" / "step_00000020")
    assert load_model(link, CPU).tokenizer_path == trained / "tokenizer"


def test_an_export_without_a_tokenizer_says_so(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "step_00000020"
    shutil.copytree(trained / "checkpoints" / "step_00000020", alone)
    export(load_model(alone, CPU), tmp_path / "out", "auto")
    assert f"warning: {alone}: is in no run folder with a tokenizer/" in capsys.readouterr().err


def test_an_export_that_would_replace_a_folder_is_refused_before_the_model_is_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr("plumbline.launcher.export.load_model", lambda *_, **__: pytest.fail("a model was read"))
    monkeypatch.setattr(sys, "argv", ["export.py", "--model", str(trained), "--output", str(tmp_path)])
    with pytest.raises(ValueError, match="exists and is not an export"):
        main()


def test_matrices_that_a_run_keeps_as_drawn_are_frozen_in_the_model_that_is_opened(
    trained: Path, tmp_path: Path
) -> None:
    """An optimizer does not get them, so it would not clear their gradients either."""
    step = Path(shutil.copytree(trained / "checkpoints" / "step_00000020", tmp_path / "step_00000020"))
    config = step / "config.yaml"
    values = yaml.safe_load(config.read_text())
    values["model"]["frozen_mlp"] = True
    config.write_text(yaml.safe_dump(values))
    reseal(config)
    opened = load_model(step, CPU)
    assert isinstance(opened.module, CausalLM)
    assert opened.config is not None
    grouped = parameter_groups(opened.module, opened.config.parameterization, lr=0.01)
    learns = {name for name, parameter in opened.module.named_parameters() if parameter.requires_grad}
    assert not any(".mlp." in name for name in learns)
    assert len(learns) == sum(len(group["params"]) for group in grouped)
