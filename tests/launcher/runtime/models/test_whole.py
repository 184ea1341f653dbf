"""A Hugging Face folder is opened with all weights of its blocks and no others, or refused by name."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BartConfig, BertConfig, PreTrainedConfig

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


BERT = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    """What it says of a text is no prediction."""
    AutoModelForCausalLM.from_config(BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: a bert without is_decoder in config.json reads the tokens"):
        load_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**BERT, is_decoder=True),
        BartConfig(vocab_size=9, d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8),
    ],
    ids=["bert", "bart"],
)
def test_its_decoder_is_not(tmp_path: Path, config: PreTrainedConfig) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    logits = load_model(tmp_path, "cpu").logits
    one, other = (logits({"input_ids": torch.tensor([[4, 5, last]])})[:, :2] for last in (6, 7))
    assert torch.equal(one, other)
