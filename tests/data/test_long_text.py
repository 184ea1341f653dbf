"""Documents too large to be tokenized at once: cut by a rule that depends on them alone, one document in the index."""

import codecs
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.data.corpus import open_corpus
from plumbline.data.heldout import cut, place
from plumbline.data.indexed import IndexedWriter, open_indexed
from plumbline.data.preparation import long_text
from plumbline.data.preparation.long_text import byte_of_cut, parts, read_part, scan
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tokenizers import Encoder
from tests.data.made import begins_texts

TEXTS = st.text("ab é🎉\n\r\u3000", min_size=1, max_size=200)
MARKS = st.sampled_from([b"", codecs.BOM_UTF8])  # at the beginning of a file


@given(text=TEXTS, before=st.integers(0, 20), after=st.integers(0, 20), mark=MARKS)
def test_parts_are_the_document_and_the_same_from_a_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, before: int, after: int, mark: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    data = text.encode()
    path.write_bytes(mark + b"x" * before + data + b"y" * after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "PART_BYTES", 16)
        cuts = list(parts(data))
        count = -(-len(data) // 16)
        read = [read_part(path, before, before + len(data), number) for number in range(count)]
    assert b"".join(cuts) == data
    assert read == cuts
    for number, part in enumerate(cuts):
        part.decode()  # no character is cut
        assert len(part) <= 32
        begin = sum(map(len, cuts[:number]))
        assert number == 0 or 16 * number <= begin < 16 * (number + 1) or begin == len(data)


def test_a_cut_is_at_a_line_start_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PART_BYTES", 16)
    assert list(parts(b"0123456789abcdef\n x\n\ny\nz and so")) == [b"0123456789abcdef\n x\n\ny\n", b"z and so"]
    assert list(parts(b"0123456789abcdef12\n indented")) == [b"0123456789abcdef12\n", b" indented"]
    assert list(parts(b"0123456789abcde\xc3\xa9 nothing")) == [b"0123456789abcde\xc3\xa9", b" nothing"]


@pytest.mark.parametrize("white", "\x85\xa0\u1680\u2000\u200a\u2028\u202f\u205f\u3000")
def test_white_space_of_unicode_is_none_between_which_to_cut(monkeypatch: pytest.MonkeyPatch, white: str) -> None:
    """At the edge of the stretch, where all but the last byte of the character lies before it, and within."""
    monkeypatch.setattr(long_text, "PART_BYTES", 16)
    after, before = f"0123456789abcdef\n{white}x\nyz".encode(), f"{'0' * 14}{white}\nx\nyz".encode()
    assert list(parts(after)) == [after[:-2], after[-2:]]
    assert list(parts(before[len(white.encode()) - 1 :])) == [before[len(white.encode()) - 1 : -2], b"yz"]
    assert list(parts("0123456789abcdef\nダ\nyz".encode()))[1:] == ["ダ\nyz".encode()], "a character like U+3000"


@given(text=TEXTS, fraction=st.floats(0.01, 0.99), block=st.integers(1, 9), mark=MARKS)
def test_a_file_is_scanned_and_cut_as_the_text_is(
    tmp_path_factory: pytest.TempPathFactory, text: str, fraction: float, block: int, mark: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(mark + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "BLOCK_BYTES", block)
        found = scan(path, seed=3)
        at = byte_of_cut(path, int(len(text) * (1 - fraction)))
    assert found == (len(text.encode()), len(text), not text.strip(), place(text.encode(), 3))
    if int(len(text) * (1 - fraction)) > 0:
        assert at == len(cut(text, fraction)[0].encode())
    path.write_bytes(text.encode() + b"\xc3")
    assert scan(path, seed=3) is None


@pytest.fixture(scope="module")
def long_source() -> str:
    """Return half a megabyte of lines, indented and not, with runs of white space and other scripts."""
    lines = [
        f"{'    ' * (number % 3)}línea {number}: text, 数据  and\ttabs{' ' * (number % 2)}\n" for number in range(9000)
    ]
    return "".join(lines)


def test_a_long_document_is_one_document_of_the_same_tokens(
    tmp_path: Path, long_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("long_text", "encoding", "pieces", "duplicates"):
        monkeypatch.setattr(f"plumbline.data.preparation.{name}.PART_BYTES", 50_000)
    monkeypatch.setattr("plumbline.data.inputs.files.PART_BYTES", 50_000)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text(long_source)
    short = [f"short {number}\n" * 10_000 for number in range(3)]  # few and large, so that all are cut
    for number, text in enumerate(short):
        (folder / f"b{number}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (long_source, *short)))
    begins = str(begins_texts(tmp_path / "begins"))
    for tokenizer in ("byte", "train-bpe:400", "train-unigram:400", begins):
        output = tmp_path / f"of-{Path(tokenizer).name.replace(':', '-')}"
        prepare(Request(Sources((str(folder),)), tokenizer, output, 0.02))
        prepare(Request(Sources((str(tmp_path / "rows.jsonl"),)), tokenizer, output.with_suffix(".rows"), 0.02))
        encoder = Encoder(output / "tokenizer", tokenizer)
        expected: dict[str, list[int]] = {"train": [], "validation": []}
        for text in (long_source, *short):
            for split, part in zip(expected, cut(text, 0.02), strict=True):
                expected[split].extend(encoder.encode(part).tolist())
        for name, found in open_corpus(output).splits.items():
            assert found.num_documents == 4
            assert found.indexed.read(0, found.num_tokens).tolist() == expected[name]
        for file in ("train.bin", "train.idx", "validation.bin"):
            assert (output / file).read_bytes() == (output.with_suffix(".rows") / file).read_bytes()


def test_a_document_longer_than_a_sequence_is_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plumbline.data.indexed.LONGEST_SEQUENCE", 5)
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(6), [3, 3])
        writer.add_documents(np.arange(6, 20), [14], continued=True)
        writer.add_documents(np.arange(20, 32), [10, 2])
    found = open_indexed(tmp_path / "x")
    assert found.num_documents == 4
    assert found.document_starts(0, 32).tolist() == [3, 20, 30]
    assert found.read(0, 32).tolist() == list(range(32))
    lengths = np.fromfile(tmp_path / "x.idx", "<i4", 8, offset=34)
    assert lengths.tolist() == [3, 5, 5, 5, 2, 5, 5, 2]


def test_a_long_text_can_be_held_out_whole(tmp_path: Path) -> None:
    text = "a line of some words\n" * 210_000
    (tmp_path / "long.txt").write_text(text)
    prepare(Request(Sources((str(tmp_path / "long.txt"),)), "byte", tmp_path / "c", validation_fraction=1.0))
    corpus = open_corpus(tmp_path / "c")
    assert set(corpus.splits) == {"validation"}
    tokens = corpus.held_out.indexed.read(0, corpus.held_out.num_tokens)
    assert bytes(tokens[:-1].astype("uint8")) == text.encode()
    assert (tokens[-1], corpus.held_out.num_documents) == (256, 1)
