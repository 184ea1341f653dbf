"""A Hugging Face folder is opened with all weights of its blocks and no others, or refused by name."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plumbline.launcher.runtime.models.open import load_model


@pytest.fixture
def theirs(exported_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_folder, tmp_path / "theirs"))


def add(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})


def test_blocks_that_the_configuration_does_not_count_are_named(theirs: Path) -> None:
    add(theirs, "model.layers.7.input_layernorm.weight")
    found = (
        r"theirs: holds 1 weights of blocks .* not count, such as model\.layers\.7\.input_layernorm\.weight: correct"
    )
    with pytest.raises(ValueError, match=found):
        load_model(theirs, "cpu")


def test_what_other_classes_have_may_be_left_over(theirs: Path) -> None:
    add(theirs, "score.weight")
    add(theirs, "model.layers.0.self_attn.rotary_emb.inv_freq")
    load_model(theirs, "cpu")


def test_a_weight_that_is_not_there_is_named(theirs: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"theirs: lacks 1 weights of \w+, such as model\.layers\.1\.mlp\.up_proj"):
        load_model(theirs, "cpu")
