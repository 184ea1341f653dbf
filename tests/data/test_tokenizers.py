"""Tokenizers: text comes back as it went in, ends exactly once, and transformers reads the same ids."""

import io
import json
import random
import textwrap
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tokenizer_making import build_tokenizer, check_tokenizer, sample_bytes, trained_size
from plumbline.data.tokenizers import Encoder, copy_tokenizer, tokenizer_sha256

TRICKY = [
    "",
    " ",
    "hello world",
    "  def f(x):\n\n\n\t    return x  \n",
    "naïve façade 你好 🎉 \u0000 \u2028 \ufeff",
    "e\u0301 ﬁ Å ① \xa0",  # what Unicode normalization would change
    "line\r\nends\r",
    "<|endoftext|> <unk> <0x0A> </s>",
    "x" * 5000,
    " " * 300,
]


@pytest.fixture(scope="session")
def sample(text_folder: Path) -> list[str]:
    texts = [path.read_bytes().decode() for path in sorted(text_folder.iterdir())]
    return [*texts, *(Path(module.__file__ or "").read_text() for module in (json, textwrap, io))]


@pytest.fixture(scope="session")
def folders(sample: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("tokenizers")
    specs = {"byte": "byte", "bpe": "train-bpe:600", "unigram": "train-unigram:600"}
    for name, spec in specs.items():
        build_tokenizer(spec, sample, parent / name)
    return {spec: parent / name for name, spec in specs.items()}


SPECS = ["byte", "train-bpe:600", "train-unigram:600"]


@pytest.mark.parametrize("spec", SPECS)
def test_text_comes_back_and_ends_once(folders: dict[str, Path], sample: list[str], spec: str) -> None:
    encoder = Encoder(folders[spec], spec)
    tokenizer = Tokenizer.from_file(str(folders[spec] / "tokenizer.json"))
    for text in [*TRICKY, *sample]:
        tokens = encoder.encode(text)
        assert tokens.dtype == encoder.dtype
        assert [place for place, token in enumerate(tokens) if token == encoder.eos_token_id] == [len(tokens) - 1]
        assert tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(folders: dict[str, Path], text: str) -> None:
    for spec in SPECS:
        encoder = Encoder(folders[spec], spec)
        tokenizer = Tokenizer.from_file(str(folders[spec] / "tokenizer.json"))
        expected = text.replace("▁", " ") if spec.startswith("train-unigram") else text  # SentencePiece's one loss
        assert tokenizer.decode(encoder.encode(text)[:-1].tolist()) == expected


@pytest.mark.parametrize("spec", SPECS)
def test_transformers_loads_it_and_agrees(folders: dict[str, Path], spec: str) -> None:
    encoder = Encoder(folders[spec], spec)
    for loader in (AutoTokenizer, PreTrainedTokenizerFast):
        tokenizer = loader.from_pretrained(folders[spec])
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", encoder.eos_token_id)
        assert tokenizer.bos_token_id == tokenizer.pad_token_id == encoder.eos_token_id
        assert len(tokenizer) == encoder.vocab_size
        for text in TRICKY:
            ids = encoder.encode(text)[:-1].tolist()
            assert tokenizer(text, split_special_tokens=True)["input_ids"] == ids
            assert tokenizer.decode(ids) == text


def test_byte_ids_are_the_bytes(folders: dict[str, Path]) -> None:
    encoder = Encoder(folders["byte"], "byte")
    slow = Encoder(folders["byte"], "the general path")
    assert (encoder.vocab_size, encoder.eos_token_id) == (257, 256)
    for text in TRICKY:
        assert encoder.encode(text).tolist() == [*text.encode(), 256] == slow.encode(text).tolist()


@pytest.mark.parametrize("spec", SPECS[1:])
def test_training_gives_the_size_asked_for_and_the_same_tokenizer_twice(
    folders: dict[str, Path], sample: list[str], tmp_path: Path, spec: str
) -> None:
    assert Encoder(folders[spec], spec).vocab_size == 600
    build_tokenizer(spec, sample, tmp_path / "again")
    assert tokenizer_sha256(tmp_path / "again") == tokenizer_sha256(folders[spec])


def test_unigram_segments_as_sentencepiece_does(
    sample: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The trained SentencePiece model is caught on its way into our export, and both encode the same text."""
    models = []

    class Caught(io.BytesIO):
        def getvalue(self) -> bytes:
            models.append(super().getvalue())
            return models[-1]

    monkeypatch.setattr("plumbline.data.tokenizer_making.io.BytesIO", Caught)
    build_tokenizer("train-unigram:600", sample, tmp_path / "unigram")
    reference = sentencepiece.SentencePieceProcessor(model_proto=models[0])
    encoder = Encoder(tmp_path / "unigram", "train-unigram:600")
    lines = [*TRICKY, *(line for text in sample for line in text.split("\n"))]
    pairs = [(encoder.encode(line)[:-1].tolist(), reference.encode(line)) for line in lines]
    # Pieces in another order have the same probability, and rounding decides: rare, in long runs of spaces.
    for line, (ours, theirs) in zip(lines, pairs, strict=True):
        assert ours == theirs or ("  " in line and sorted(ours) == sorted(theirs))
    assert sum(ours != theirs for ours, theirs in pairs) < len(pairs) / 100


def test_an_adopted_tokenizer_keeps_its_identity(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["train-bpe:600"]
    build_tokenizer(str(source), [], tmp_path / "copy")
    assert tokenizer_sha256(tmp_path / "copy") == tokenizer_sha256(source)


def gpt2_like(folder: Path, source: Path, **changes: object) -> Path:
    """Return a tokenizer that belongs to a model's own class, with settings that would spoil a corpus."""
    from transformers import GPT2TokenizerFast

    tokenizer = GPT2TokenizerFast.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_models_own_tokenizer_is_adopted(folders: dict[str, Path], tmp_path: Path) -> None:
    source = gpt2_like(tmp_path / "gpt2", folders["train-bpe:600"])
    build_tokenizer(str(source), [], tmp_path / "adopted")
    encoder = Encoder(tmp_path / "adopted", str(source))
    reference = AutoTokenizer.from_pretrained(source)
    text = "def f(x): return 'naïve' <|endoftext|>\n"
    assert encoder.eos_token_id == reference.eos_token_id
    assert encoder.encode(text)[:-1].tolist() == reference(text, split_special_tokens=True)["input_ids"]


def test_truncation_padding_and_added_tokens_are_not_adopted(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "spoiled"
    build_tokenizer("byte", [], source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(str(source / "tokenizer.json"))
    build_tokenizer(str(source), [], tmp_path / "adopted")
    assert Encoder(tmp_path / "adopted", str(source)).encode("abcdef").tolist() == [*b"abcdef", 256]


@pytest.mark.parametrize("text", ["<s>old price</s> new", "a <pad> b"])
def test_names_of_special_pieces_are_text(tmp_path: Path, text: str) -> None:
    """As in T5: SentencePiece has pieces for them that no text matches."""
    names = ["<pad>", "</s>", "<unk>", "<s>"]
    pieces = [*((name, 0.0) for name in names), *((chr(code), -3.0) for code in range(0x20, 0x7F))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.add_special_tokens(names)
    (tmp_path / "source").mkdir()
    tokenizer.save(str(tmp_path / "source" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = Encoder(tmp_path / "source", "source")
    assert encoder.encode(text).tolist() == [*(4 + ord(character) - 0x20 for character in text), 1]


def test_a_tokenizer_without_an_end_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "endless"
    build_tokenizer("byte", [], source)
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no eos_token to end documents with"):
        build_tokenizer(str(source), [], tmp_path / "adopted")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train-bpe:256", "smallest vocabulary is 257"),
        ("train-unigram:300", "smallest vocabulary is 353"),
        ("train-bpe:many", "expected train-bpe:N with N a whole number"),
        ("train-bpe", "expected train-bpe:N"),
        ("bytes", "bytes: no such folder; of the hub it would be hf:bytes; known: byte, train-bpe:N"),
        ("bpe:512", "bpe:512: no such folder; did you mean train-bpe:512\\?"),
    ],
)
def test_a_bad_tokenizer_is_refused_before_any_work(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tokenizer(spec)


def test_a_corpus_is_not_its_tokenizer(corpus: Path) -> None:
    with pytest.raises(ValueError, match=rf"--tokenizer {corpus}: is a corpus; its tokenizer is {corpus}/tokenizer"):
        check_tokenizer(str(corpus))
    check_tokenizer(f"{corpus}/tokenizer")


def test_the_smallest_vocabularies_work(sample: list[str], tmp_path: Path) -> None:
    for spec in ("train-bpe:257", "train-unigram:353"):
        assert trained_size(spec) == int(spec.split(":")[1])
        build_tokenizer(spec, ["abc", "the cat sat on the mat\n"], tmp_path / spec)
        assert Encoder(tmp_path / spec, spec).vocab_size <= 353


@pytest.mark.parametrize("spec", ["train-bpe:5000", "train-unigram:5000"])
def test_little_text_gives_a_smaller_vocabulary(tmp_path: Path, spec: str) -> None:
    build_tokenizer(spec, ["the cat sat on the mat\n" * 20], tmp_path / "small")
    assert 257 < Encoder(tmp_path / "small", spec).vocab_size < 5000


def test_tokenizers_that_are_trained_want_the_largest_sample() -> None:
    assert 0 == sample_bytes("byte") < sample_bytes("hf:gpt2") < sample_bytes("train-bpe:8192")


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: cannot be read: "):
        build_tokenizer(str(tmp_path), [], tmp_path / "adopted")


def test_long_lines_are_trained_on(tmp_path: Path) -> None:
    words = random.Random(0).choices(["alpha", "beta", "gamma"], k=20_000)  # one line, beyond what SentencePiece reads
    build_tokenizer("train-unigram:400", [" ".join(words)], tmp_path / "t")
    encoder = Encoder(tmp_path / "t", "train-unigram:400")
    assert len(encoder.encode(" alpha beta gamma")) < len(" alpha beta gamma") / 2


@pytest.mark.parametrize(
    ("text", "lost"),
    [("the cat", None), ("The cat", "'The cat' comes back as 'the cat'"), ("the 猫", "'猫' comes back as '<unk>'")],
)
def test_what_a_tokenizer_loses_is_said(tmp_path: Path, text: str, lost: str | None) -> None:
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")} | {"<unk>": 27}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path / "t"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="z").save_pretrained(folder)
    found = Encoder(folder, str(folder)).what_changes(text)
    assert found == lost


def test_it_is_said_where_a_corpus_is_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "t"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    (tmp_path / "a.txt").write_text("the cat\n" * 50)
    prepare(Request(Sources((str(tmp_path / "a.txt"),)), str(folder), tmp_path / "c", 0.1))
    assert "of 1 texts that it was tried on 1 come back changed" in caplog.text
    caplog.clear()
    prepare(Request(Sources((str(tmp_path / "a.txt"),)), "byte", tmp_path / "d", 0.1))
    prepare(Request(Sources((str(tmp_path / "a.txt"),)), str(tmp_path / "d" / "tokenizer"), tmp_path / "e", 0.1))
    assert "changed" not in caplog.text


def test_a_model_of_sentencepiece_alone_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x.model").touch()
    with pytest.raises(ValueError, match=r"x\.model: is a file; give the folder"):
        check_tokenizer(str(tmp_path / "x.model"))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ValueError, match=r"has none of tokenizer\.json, tokenizer_config\.json and config\.json"):
        check_tokenizer(str(tmp_path))
    (tmp_path / "config.json").touch()
    check_tokenizer(str(tmp_path))


def test_copies_can_be_written_and_copied_over_whatever_the_source_allows(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    for file in (source / "merges.txt", source / "additional_chat_templates" / "two.jinja"):
        file.write_text(file.name)
        file.chmod(0o444)
    for folder in (source / "additional_chat_templates", source):
        folder.chmod(0o555)
    copy_tokenizer(source, target)
    (target / "merges.txt").write_text("other")
    (target / "own").write_text("stays")
    copy_tokenizer(source, target)
    assert {path.name: path.read_text() for path in target.rglob("*") if path.is_file()} == {
        "merges.txt": "merges.txt", "two.jinja": "two.jinja", "own": "stays"
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o200 for path in [target, *target.rglob("*")])


def test_of_a_tokenizer_folder_no_code_and_no_unknown_file_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("custom_generate/generate.py", "__pycache__/lookahead.cpython-312.pyc", "vocab.py", "notes.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / "tokenizer.json").write_text("{}")
    (source / "loop").symlink_to(source)
    copy_tokenizer(source, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").rglob("*")] == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["merges.txt", "additional_chat_templates"])
def test_a_link_out_of_a_tokenizer_folder_is_refused(tmp_path: Path, name: str) -> None:
    source, private = tmp_path / "source", tmp_path / "private"
    source.mkdir()
    private.mkdir()
    (private / "key").write_text("secret")
    (source / name).symlink_to(private if name == "additional_chat_templates" else private / "key")
    with pytest.raises(ValueError, match=rf"{source}/{name}.*: leads out of the folder of its tokenizer; put the file"):
        copy_tokenizer(source, tmp_path / "target")


def test_links_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    source = tmp_path / "models--one" / "snapshots" / "0123"
    source.mkdir(parents=True)
    (tmp_path / "models--one" / "blobs").mkdir()
    (tmp_path / "models--one" / "blobs" / "abc").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/abc")
    copy_tokenizer(source, tmp_path / "target")
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "target" / "tokenizer.json").is_symlink()
