"""Ids that other tools made: every layout gives the corpus that the same text gives, and what is wrong is named."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import DTypeLike

from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.manifest import Manifest
from plumbline.data.preparation import token_files
from plumbline.data.preparation.growing import merge
from plumbline.data.preparation.importing import TokenRequest, import_tokens
from plumbline.data.preparation.verifying import verify
from tests.data.test_prepare import leftovers, make, run

LAYOUTS = ("nanogpt", "wide", "llm.c", "numpy", "numpy int64")


def write(path: Path, ids: Sequence[int] | np.ndarray, layout: str = "nanogpt") -> Path:
    """Write ids as other trainers' tools do, spelled out."""
    kinds: dict[str, DTypeLike] = {"wide": "<u4", "numpy int64": "<i8"}
    tokens = np.asarray(ids, kinds.get(layout, "<u2"))
    if layout.startswith("numpy"):
        np.save(path.with_suffix(".npy"), tokens)
        return path.with_suffix(".npy")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes((header.tobytes() if layout == "llm.c" else b"") + tokens.tobytes())
    return path


def ids_of(corpus: Path, split: str) -> np.ndarray:
    tokens = open_corpus(corpus).splits[split].indexed
    return np.asarray(tokens.read(0, len(tokens)))


def brought(folder: Path, tokens: Sequence[Path], held_out: Path, tokenizer: Path | str) -> Manifest:
    names = tuple(map(str, tokens))
    return import_tokens(TokenRequest(names, (str(held_out),), str(tokenizer), folder, overwrite=False)).manifest


@pytest.fixture(scope="module")
def prepared(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a corpus with byte-level BPE."""
    output = tmp_path_factory.mktemp("prepared") / "bpe"
    make(text_folder, output, "train-bpe:300", validation_fraction=0.2)
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_every_layout_give_the_corpus_that_the_text_gives(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(token_files, "AT_ONCE", 700)  # documents are cut where reading pauses
    train, held_out = ids_of(prepared, "train"), write(tmp_path / "val.bin", ids_of(prepared, "validation"), layout)
    cuts = [0, 1000, 1003, len(train) // 2, len(train)]  # within documents, as llm.c's tools cut them
    shards = [
        write(tmp_path / f"train_{n}.bin", train[first:last], layout) for n, (first, last) in enumerate(pairwise(cuts))
    ]
    manifest = brought(tmp_path / "made", shards, held_out, prepared / "tokenizer")

    expected = read_manifest(prepared)
    for key in ("splits", "files", "vocab_size", "eos_token_id", "begins_with", "unigram_entropy"):
        assert getattr(manifest, key) == getattr(expected, key), key
    assert manifest.tokenizer.sha256 == expected.tokenizer.sha256
    assert verify(tmp_path / "made") == (manifest, [])


@pytest.mark.parametrize("tokenizer", ["byte", "train-unigram:400"])
def test_the_bytes_of_text_are_those_of_the_text(text_folder: Path, tmp_path: Path, tokenizer: str) -> None:
    make(text_folder, tmp_path / "text", tokenizer, validation_fraction=0.2)
    files = [write(tmp_path / f"{split}.bin", ids_of(tmp_path / "text", split)) for split in ("train", "validation")]
    own = tmp_path / "text" / "tokenizer"
    manifest = brought(tmp_path / "made", files[:1], files[1], tokenizer if tokenizer == "byte" else own)
    assert manifest.splits == read_manifest(tmp_path / "text").splits


def test_special_tokens_and_the_text_of_added_ones_are_counted_as_text_has_them(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    make_bytes = tmp_path / "a.txt"
    make_bytes.write_text("a text\n" * 50)
    make(make_bytes, tmp_path / "text")
    tokenizer = Tokenizer.from_file(str(tmp_path / "text" / "tokenizer" / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("größer", special=False)])
    tokenizer.add_special_tokens([AddedToken("<tool>", special=True)])
    tokenizer.save(str(tmp_path / "text" / "tokenizer" / "tokenizer.json"))

    files = [write(tmp_path / f"{name}.bin", [97, 257, 258, 98, 256]) for name in ("train", "val")]
    counts = brought(tmp_path / "made", files[:1], files[1], tmp_path / "text" / "tokenizer").splits["train"]
    assert counts.source_bytes == len("agrößerb".encode())


def test_documents_end_with_the_end_of_text_wherever_it_stands(tmp_path: Path) -> None:
    first = write(tmp_path / "1.bin", [256, 5, 6, 256, 7])  # llm.c begins documents with it
    second = write(tmp_path / "2.bin", [8, 256, 9, 9])
    brought(tmp_path / "made", [first, second], write(tmp_path / "v.bin", [1, 2, 3]), "byte")
    corpus = open_corpus(tmp_path / "made")
    train = corpus.splits["train"]
    assert ids_of(tmp_path / "made", "train").tolist() == [256, 5, 6, 256, 7, 8, 256, 9, 9]
    assert train.indexed.document_starts(0, 9).tolist() == [1, 4, 7]
    assert train.num_documents == 4


def test_a_text_without_end_of_text_is_one_document_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = write(tmp_path / "t.bin", [5, 6, 7])
    manifest = brought(tmp_path / "made", [tokens], write(tmp_path / "v.bin", [1, 256]), "byte")
    assert manifest.splits["train"].documents == 1
    assert f"{tokens}: the end-of-text token 256 does not occur, so all of train is one document" in caplog.text
    assert "v.bin" not in caplog.text


def test_many_ids_without_end_of_text_are_those_of_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "LONGEST", 8)
    tokens = write(tmp_path / "t.bin", [5] * 9)
    with pytest.raises(ValueError, match=r"9 ids up to here without the end-of-text token 256; give --tok"):
        brought(tmp_path / "made", [tokens], write(tmp_path / "v.bin", [1, 256]), "byte")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "t.bin",
            np.array([1, 2, 300], "<u2"),
            "t.bin: id 300 at place 2, and the tokenizer has ids 0 to 256; give --tokenizer",
        ),
        ("t.bin", b"", "t.bin: 0 bytes; expected ids of 2 or 4 bytes each"),
        ("t.bin", b"abc", "t.bin: 3 bytes; expected ids of 2 or 4 bytes each"),
        ("t.bin", np.array([20240520, 1, 9] + [0] * 253, "<i4"), "header states 9 ids of 2 bytes .* truncated"),
        ("t.bin", np.array([20240520, 1, 0] + [0] * 253, "<i4"), "header states 0 ids"),
        ("t.npy", np.zeros((2, 2), np.int32), r"t.npy: int32 \[2, 2\]; expected one row of whole numbers"),
        ("t.npy", np.zeros(2), r"t.npy: float64 \[2\]; expected one row of whole numbers"),
        ("t.npy", np.array([-1, 5]), "t.npy: id -1 at place 0"),
        ("t.npy", np.empty(0, np.uint16), "t.npy"),
        ("t.npy", np.array([None]), "t.npy: cannot be read"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, name: str, content: bytes | np.ndarray, error: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name.endswith(".npy"):
        np.save(path, content)
    else:
        path.write_bytes(content.tobytes())
    with pytest.raises(ValueError, match=error):
        brought(tmp_path / "made", [path], write(tmp_path / "v.bin", [1, 256]), "byte")
    assert not (tmp_path / "made").exists()
    assert not leftovers(tmp_path)


def test_ids_of_any_types_of_numpy_are_read_end_to_end(tmp_path: Path) -> None:
    kinds = ("<u8", ">i4", ">u8", "<u2", "<i8", "i1")
    for number, kind in enumerate(kinds):
        np.save(tmp_path / f"{number}.npy", np.array([number], kind))
    paths = [tmp_path / f"{number}.npy" for number in range(len(kinds))]
    ((tokens, lengths),) = token_files.documents(paths, vocab_size=10, eos_token_id=5)
    assert tokens.dtype.kind == "i"
    assert (tokens.tolist(), lengths.tolist()) == ([0, 1, 2, 3, 4, 5], [6])


def test_a_vocabulary_beyond_two_bytes_is_read_as_four(tmp_path: Path) -> None:
    ids = np.array([5, 70_000, 9], "<u4")
    ids.tofile(tmp_path / "t.bin")
    assert token_files.open_tokens(tmp_path / "t.bin", 100_000).tolist() == ids.tolist()
    (tmp_path / "t.bin").write_bytes(b"123456")
    with pytest.raises(ValueError, match="6 bytes; expected ids of 4 bytes each for 100,000 token ids"):
        token_files.open_tokens(tmp_path / "t.bin", 100_000)


def test_a_pair_of_megatron_needs_no_copy(prepared: Path, tmp_path: Path) -> None:
    held_out = write(tmp_path / "v.bin", [1, 256])
    with pytest.raises(ValueError, match=rf"train.bin: belongs to a Megatron-LM pair, .*path: {prepared}/train\}}"):
        brought(tmp_path / "made", [prepared / "train.bin"], held_out, "byte")


def test_the_command_takes_globs_and_does_nothing_twice(prepared: Path, tmp_path: Path) -> None:
    train = ids_of(prepared, "train")
    for number, part in enumerate(np.array_split(train, 11)):
        write(tmp_path / f"train_{number:06}.bin", part, "llm.c")
    write(tmp_path / "val.bin", ids_of(prepared, "validation"))
    options = ("--validation-tokens", tmp_path / "val.bin", "--tokenizer", prepared / "tokenizer")
    command = ("--tokens", tmp_path / "train_*.bin", *options, "--output", tmp_path / "made")
    first, again = run(*command), run(*command)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert first.stdout.startswith("prepared")
    assert again.stdout.startswith("already prepared")
    assert read_manifest(tmp_path / "made").files == read_manifest(prepared).files

    write(tmp_path / "train_000011.bin", [1, 2, 3], "llm.c")
    other = run(*command)
    assert other.returncode == 2
    assert "files have come, gone, or have another size or time since" in other.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--tokenizer", "byte"), "--tokens needs --validation-tokens"),
        (("--validation-tokens", "v.bin"), "--tokens needs --tokenizer"),
        (("--tokenizer", "byte", "--validation-tokens", "none*"), "--validation-tokens none*: no file matches"),
        (("--tokenizer", "byte", "--validation-tokens", "t.bin"), "--validation-tokens t.bin: is named twice"),
        (("--tokenizer", "train-bpe:300", "--validation-tokens", "v.bin"), "--tokens needs the tokenizer that made"),
        (("--tokenizer", "byte", "--validation-tokens", "v.bin", "--seed", "3"), "--seed does nothing with --tokens"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_read(
    tmp_path: Path, options: tuple[str, ...], error: str
) -> None:
    for name in ("t.bin", "v.bin"):
        write(tmp_path / name, [1, 256])
    refused = run("--tokens", "t.bin", "--output", "made", *options, cwd=tmp_path)
    assert refused.returncode != 0
    assert error in refused.stderr
    assert "Traceback" not in refused.stderr


def test_text_is_not_appended_by_a_rule_that_did_not_hold_out(text_folder: Path, tmp_path: Path) -> None:
    tokens, held_out = write(tmp_path / "t.bin", [5, 256]), write(tmp_path / "v.bin", [1, 256])
    brought(tmp_path / "made", [tokens], held_out, "byte")
    brought(tmp_path / "more", [write(tmp_path / "u.bin", [7, 256])], write(tmp_path / "w.bin", [2, 256]), "byte")
    merge([tmp_path / "made", tmp_path / "more"], tmp_path / "both")
    for corpus in ("made", "both"):
        refused = run("--append", text_folder, "--output", tmp_path / corpus)
        assert f"{corpus}: its texts were not held out by one rule, so nothing can be appended to it" in refused.stderr
