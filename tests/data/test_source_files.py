"""Files of folders: what is read, what is left out, and what is said of it."""

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.inputs import folder as folders
from plumbline.data.inputs.files import contents_of
from plumbline.data.inputs.folder import Folder
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import read_records
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources


def texts_of(path: Path, separator: str | None = None) -> list[str]:
    sources = Sources((str(path),), Reading(document_separator=separator))
    units = sources.listed().units()
    return [record.text for unit in units for record in read_records(sources.reading, unit) if record.text]


def write_rows(path: Path, count: int = 200) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"row {n} of {path.name}"}) + "\n" for n in range(count)))


def test_a_corpus_in_a_folder_is_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    prepare(Request(Sources((str(tmp_path),)), "byte", tmp_path / "corpora" / "c", 0.1))
    assert texts_of(tmp_path) == ["a text\n" * 50]
    assert any("prepared already are left out" in line for line in Sources((str(tmp_path),)).listed().warnings())
    with pytest.raises(ValueError, match="is a corpus already"):
        Sources((str(tmp_path / "corpora" / "c"),)).listed().fingerprint()


def test_texts_beside_rows_are_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(50)))
    assert list(Sources((str(tmp_path),)).listed().warnings()) == []
    (tmp_path / "README.md").write_text("# Dataset card\n")
    (warning,) = Sources((str(tmp_path),)).listed().warnings()
    assert "read as one text each" in warning
    assert "README.md" in warning
    (tmp_path / "code.py").write_text("pass\n" * 1000)  # then the rows may be what is beside
    assert list(Sources((str(tmp_path),)).listed().warnings()) == []


@pytest.mark.parametrize("size", [100, 5 << 20])
def test_a_binary_file_is_no_text(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.npy").write_bytes(b"\x01\0" * size)
    for separator in (None, "x"):
        sources = Sources((str(tmp_path),), Reading(document_separator=separator))
        assert prepare(Request(sources, "byte", tmp_path / f"c{separator}", 0.5)).manifest.skipped == {"binary": 1}


def test_a_text_of_another_encoding_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a text" * 9)
    (tmp_path / "b.txt").write_bytes("a text".encode("utf-16"))
    (tmp_path / "c.txt").write_text("one \0 in many" + " letters" * 99)
    result = prepare(Request(Sources((str(tmp_path / "*.txt"),)), "byte", tmp_path / "c", 0.5))
    assert result.manifest.skipped == {"not UTF-8": 1}
    assert "1 of 3 texts are not UTF-8 or binary, and left out, files of 14 of 873 bytes; the largest: " in caplog.text


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"a text")
    assert texts_of(tmp_path / "a.txt") == ["a text"]
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"one|two" + b" " * (5 << 20))
    assert texts_of(tmp_path / "b.txt", separator="|")[0] == "one"
    (tmp_path / "c.txt").write_bytes(codecs.BOM_UTF8 + b"one\n" * (2 << 20))  # in parts
    prepare(Request(Sources((str(tmp_path / "c.txt"),)), "byte", tmp_path / "corpus", 0.1))
    assert sum(split.source_bytes for split in read_manifest(tmp_path / "corpus").splits.values()) == 8 << 20
    tokens = open_corpus(tmp_path / "corpus").splits["train"].indexed.read(0, 4)
    assert bytes(tokens.tolist()) == b"one\n"


@pytest.mark.parametrize("separator", [None, "|"])
@pytest.mark.parametrize("size", [100_000, 5 << 20])
def test_a_lost_file_that_is_much_of_the_text_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, separator: str | None
) -> None:
    write_rows(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "b.txt").write_bytes(b"\xff")
    (tmp_path / "in" / "big.txt").write_bytes(b"x" * size + b"\xe9.")
    sources = Sources((str(tmp_path / "in"),), Reading(document_separator=separator))
    manifest = prepare(Request(sources, "byte", tmp_path / "c", 0.1)).manifest
    problem = f"big.txt: 'utf-8' codec can't decode byte 0xe9 in position {size}: invalid continuation byte"
    problem += "; convert it to UTF-8, as iconv does"
    assert f"2 of 202 texts are not UTF-8 or binary, and left out, files of {size + 3:,} of " in caplog.text
    assert f"; the largest: {tmp_path}/in/{problem}" in caplog.text
    assert manifest.bad_records[1].endswith(problem)


def test_sources_that_give_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.jsonl").touch()
    sources = Sources(tuple(f"{tmp_path}/{name}" for name in ("a.jsonl", "b.txt", "c.jsonl")))
    prepare(Request(sources, "byte", tmp_path / "made", 0.1))
    named = (
        f"2 of 3 sources hold no document to read: {tmp_path}/b.txt, {tmp_path}/c.jsonl; the first: {tmp_path}/b.txt"
    )
    assert f"{named}: 'utf-8' codec can't decode" in caplog.text
    prepare(Request(Sources(sources.specs[::2]), "byte", tmp_path / "other", 0.1))
    assert f"1 of 2 sources hold no document to read: {tmp_path}/c.jsonl; the first: there is nothing" in caplog.text


def test_a_corpus_of_files_whose_names_are_not_utf8_opens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write_rows(folder / "a.jsonl")
    (folder / os.fsdecode(b"\xfc.txt")).write_bytes(b"\xfc")
    request = Request(Sources((str(folder),)), "byte", tmp_path / "c", 0.1)
    manifest = prepare(request).manifest
    assert read_manifest(tmp_path / "c") == manifest
    assert manifest.request["source"] == list(manifest.sources) == [f"{tmp_path}/caf\\udce9"]
    assert manifest.bad_records[0].startswith(f"{tmp_path}/caf\\udce9/\\udcfc.txt: 'utf-8' codec")
    (warning,) = request.sources.listed().warnings()
    assert f"such as {tmp_path}/caf\\udce9/\\udcfc.txt" in warning
    assert caplog.text.encode(), "whatever is logged can be written"
    assert prepare(request).seconds is None


def test_a_folder_is_listed_before_it_is_read_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[Path] = []

    def noted(below: Path) -> Iterator[Path]:
        listed.append(below)
        return contents_of(below)

    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for number in range(9):
        (tmp_path / "texts" / "deep" / f"{number}.txt").write_text(f"text {number}, of nine")
    monkeypatch.setattr(folders, "contents_of", noted)
    prepare(Request(Sources((str(tmp_path / "texts"),)), "byte", tmp_path / "c", 0.3))
    assert listed == [tmp_path / "texts"] * 2


def test_an_empty_name_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    sources = Sources(("",))
    for ask in (sources.listed().fingerprint, sources.listed().file_keys, lambda: list(sources.listed().units())):
        with pytest.raises(ValueError, match="source : no file matches; give a file, a folder, a glob"):
            ask()


def test_a_file_that_links_name_again_is_read_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "blobs" / "0123")
    for name in ("snapshots/r1/d.jsonl", "snapshots/r2/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "blobs" / "0123")
    (tmp_path / "linked").symlink_to(tmp_path / "snapshots")
    rows = [f"row {n} of 0123" for n in range(200)]
    again = f"{tmp_path}/blobs/0123, which is {tmp_path}/snapshots/r1/d.jsonl"
    for spec, count, example in (
        (tmp_path, 2, again),
        (tmp_path / "snapshots", 1, "r2/d.jsonl, which is "),
        (tmp_path / "**" / "[0d]*", 4, "which is "),
        (tmp_path / "*" / "r1" / "*", 1, "snapshots/r1/d.jsonl, which is "),
    ):
        sources = Sources((str(spec),))
        assert texts_of(spec) == rows
        (warning,) = sources.listed().warnings()
        assert f"files that links name again are read once ({count}, such as " in warning
        assert example in warning
        assert sources.listed().fingerprint()
    write_rows(tmp_path / "rows" / "a.jsonl")
    (tmp_path / "also").symlink_to(tmp_path / "rows")
    assert len(texts_of(tmp_path / "*" / "a.jsonl")) == 200


@pytest.mark.parametrize("name", ["a.txt", "a.JSONL.bak", "0123"])
def test_rows_are_not_read_as_one_text(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name)
    (tmp_path / "b.txt").write_text('{"one": 1}\nand no more\n')
    for spec in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(ValueError, match=rf"{name}: lines that are JSON objects, .*: give it a name that ends in"):
            texts_of(spec)
    assert len(texts_of(tmp_path)) == 2, "in a folder of text it is text"
    (warning,) = Sources((str(tmp_path),)).listed().warnings()
    assert f"JSON objects are read as one text each: name them .jsonl (1, such as {tmp_path}/{name})" in warning


def test_a_link_without_an_ending_takes_no_rows_away(tmp_path: Path) -> None:
    write_rows(tmp_path / "d.jsonl")
    (tmp_path / "latest").symlink_to(tmp_path / "d.jsonl")
    assert Folder(str(tmp_path), Reading()).files() == [tmp_path / "d.jsonl"]
