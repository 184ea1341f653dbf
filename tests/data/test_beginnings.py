"""Documents of corpora begin as their tokenizer begins a text."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.preparation.growing import append, merge
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tokenizer_making import build_tokenizer
from plumbline.data.tokenizers import Encoder
from tests.data.made import begins_texts


def make(folder: Path, name: str, tokenizer: Path) -> None:
    """Make a corpus of two documents, one in each split."""
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two")))
    prepare(Request(Sources((str(folder / "text.jsonl"),)), str(tokenizer), folder / name, 0.5))


def test_documents_begin_as_the_tokenizer_begins_texts(tmp_path: Path) -> None:
    """As Llama's <s>: transformers, evaluation harnesses and servers put it before every text."""
    source = begins_texts(tmp_path / "source")
    build_tokenizer(str(source), [], tmp_path / "adopted")
    encoder = Encoder(tmp_path / "adopted", str(source))
    assert encoder.begins_with == [257]
    assert encoder.encode("ab<s>").tolist() == [257, *b"ab<s>", 256]
    assert encoder.encode("ab", begins=False, ends=False).tolist() == [*b"ab"]
    assert AutoTokenizer.from_pretrained(tmp_path / "adopted")("ab")["input_ids"] == encoder.encode("ab")[:-1].tolist()
    make(tmp_path, "c", source)
    corpus = open_corpus(tmp_path / "c")
    assert read_manifest(tmp_path / "c").begins_with == [257]
    found = [corpus.splits[split].indexed.read(0, 5).tolist() for split in ("train", "validation")]
    assert sorted(found) == [[257, *b"one", 256], [257, *b"two", 256]]


def test_a_corpus_whose_documents_begin_otherwise_does_not_grow(tmp_path: Path) -> None:
    source = begins_texts(tmp_path / "source")
    for name in ("c", "d"):
        make(tmp_path, name, source)
    manifest = json.loads((tmp_path / "c" / "corpus.json").read_text())
    (tmp_path / "c" / "corpus.json").write_text(json.dumps({**manifest, "begins_with": []}))
    with pytest.raises(
        ValueError, match=r"texts begin and end with \(\[257\], 256\), corpus.json expects \(\[\], 256\)"
    ):
        append(tmp_path / "c", Sources((str(tmp_path / "text.jsonl"),)))
    with pytest.raises(ValueError, match=r"d begin with \[257\], of .*c with \[\]"):
        merge([tmp_path / "d", tmp_path / "c"], tmp_path / "e")
