"""Special tokens of an exported folder: those of its tokenizer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from plumbline.data.tokenizer_making import build_tokenizer
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.model.decoder import CausalLM
from tests.data.made import begins_texts
from tests.model.conftest import loaded

MakeModel = Callable[..., CausalLM]


def padded(folder: Path) -> Path:
    """Write a tokenizer with <s> before every text, and a token to pad with."""
    tokenizer = AutoTokenizer.from_pretrained(begins_texts(folder))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    return folder


def of_bytes(folder: Path) -> Path:
    build_tokenizer("byte", [], folder)
    return folder


@pytest.mark.parametrize("target", ["auto", "native"])
@pytest.mark.parametrize(("make", "ids"), [(padded, (257, 256, 258)), (of_bytes, (256, 256, 256))])
def test_they_are_those_of_the_tokenizer(
    make_model: MakeModel, tmp_path: Path, target: str, make: Callable[[Path], Path], ids: tuple[int, int, int]
) -> None:
    model = replace(loaded(make_model(vocab_size=259), tmp_path), tokenizer_path=make(tmp_path / "tokenizer"))
    export(model, tmp_path / "out", target)
    config, generation = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert tuple(generation[name] for name in names) == ids
    assert tuple(config[name] for name in names) == (*ids[:2], None), "a padding_idx would get no gradient"
