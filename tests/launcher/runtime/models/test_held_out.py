"""What a model may be scored on: text of its own tokenizer, whoever saved it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from plumbline.data.config import SourceConfig
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.opening import open_source
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tokenizer_making import build_tokenizer
from plumbline.data.tokenizers import CONFIG, tokenizer_sha256
from plumbline.launcher.runtime.models.held_out import check_tokenizer, check_vocabulary
from plumbline.launcher.runtime.models.open import LoadedModel


class Named(nn.Module):
    """Stand for a model of which only the vocabulary counts."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.config = type("Config", (), {"vocab_size": vocab_size})


def model(tokenizer: Path, vocab_size: int = 300) -> LoadedModel:
    return LoadedModel(Named(vocab_size), tokenizer.parent, tokenizer, None, None, None)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a tokenizer that transformers loads by a class of its own, as those of stock models are."""
    folder = tmp_path / "stock"
    build_tokenizer("train-bpe:300", ["words to learn from " * 50], folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    return folder


def corpus_of(tokenizer: str, tmp_path: Path, name: str) -> Corpus:
    (tmp_path / "text.txt").write_text("some words to score " * 9)
    prepare(Request(Sources((str(tmp_path / "text.txt"),)), tokenizer, tmp_path / name, validation_fraction=1.0))
    return open_corpus(tmp_path / name)


def test_a_corpus_that_is_made_as_the_hint_says_is_accepted(tokenizer: Path, tmp_path: Path) -> None:
    """prepare.py saves the tokenizer of a stock model again, and other bytes come out."""
    corpus = corpus_of(str(tokenizer), tmp_path, "its own")
    assert corpus.tokenizer_sha256 != tokenizer_sha256(tokenizer)
    check_tokenizer(model(tokenizer), corpus)
    check_tokenizer(model(tokenizer), replace(corpus, tokenizer_sha256=tokenizer_sha256(tokenizer)))
    other = corpus_of("byte", tmp_path, "other")
    with pytest.raises(ValueError, match=f"other: made with another tokenizer .*--tokenizer {tokenizer}$"):
        check_tokenizer(model(tokenizer), other)
    with pytest.raises(ValueError, match=rf"vocabulary of \d+, .*knows 257 ids; .*--tokenizer {tokenizer}$"):
        check_tokenizer(model(tokenizer, 257), corpus)


def test_a_task_with_other_ids_asks_for_what_fixes_them_and_for_no_tokenizer(tokenizer: Path) -> None:
    task = open_source(SourceConfig.model_validate({"task": {"name": "reachability", "names": 64}}))
    with pytest.raises(ValueError, match=r"give --task what fixes .* \(form, answer, names, \.\.\.\)$"):
        check_vocabulary(model(tokenizer, 40), task)
