"""The tokenizer of an exported folder: its special tokens are the model's, and it cuts where the positions end."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plumbline.data.tokenizer_making import build_tokenizer
from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.model.decoder import CausalLM
from tests.data.made import begins_texts
from tests.model.conftest import SHAPE, loaded

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
    begin, end, pad = ids
    expected = (begin, end, None if pad == end else pad)
    assert tuple(config[name] for name in names) == expected, "a padding_idx would get no gradient"


def test_the_embedding_that_begins_texts_goes_on_learning(make_model: MakeModel, tmp_path: Path) -> None:
    made = make_model(vocab_size=257, tie_word_embeddings=False)
    model = replace(loaded(made, tmp_path), tokenizer_path=of_bytes(tmp_path / "tokenizer"))
    export(model, tmp_path / "out", "auto")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = torch.tensor([[256, *b"a text"]])
    stock(text, labels=text).loss.backward()
    assert stock.get_input_embeddings().weight.grad[256].norm() > 0


def test_it_truncates_to_the_positions_of_the_model(make_model: MakeModel, tmp_path: Path) -> None:
    source = of_bytes(tmp_path / "tokenizer")
    given = (source / "tokenizer_config.json").read_text()
    export(replace(loaded(make_model(vocab_size=257), tmp_path), tokenizer_path=source), tmp_path / "out", "auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer("x" * 100, truncation=True).input_ids) == SHAPE["max_position_embeddings"]
    assert (source / "tokenizer_config.json").read_text() == given, "a corpus has texts of any length"


@pytest.mark.parametrize("target", ["auto", "native"])
def test_the_card_s_lines_load_it_without_a_question(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """For its tokenizer, too, transformers reads the configuration, whose class is in a native folder."""
    model = replace(loaded(make_model(vocab_size=257), tmp_path), tokenizer_path=of_bytes(tmp_path / "tokenizer"))
    export(model, tmp_path / "out", target)
    asked: list[str] = []

    def refuse(question: str) -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", refuse)
    _, lines, _ = (tmp_path / "out" / "README.md").read_text().split("```")
    names: dict[str, Any] = {}
    exec(lines.removeprefix("python"), names)
    assert names["tokenizer"]("ab").input_ids == [97, 98]
    assert asked == []
