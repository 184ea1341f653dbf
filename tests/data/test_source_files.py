"""Files of folders: what is read, what is left out, and what is said of it."""

import codecs
import json
from pathlib import Path

import pytest

from plumbline.data.preparation.records import read_records
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources


def texts_of(path: Path, separator: str | None = None) -> list[str]:
    sources = Sources((str(path),), document_separator=separator)
    return [record.text for unit in sources.units() for record in read_records(sources, unit) if record.text]


def test_a_corpus_in_a_folder_is_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    prepare(Request(Sources((str(tmp_path),)), "byte", tmp_path / "corpora" / "c", 0.1))
    assert texts_of(tmp_path) == ["a text\n" * 50]
    assert any("prepared already are left out" in line for line in Sources((str(tmp_path),)).warnings())
    with pytest.raises(ValueError, match="is a corpus already"):
        Sources((str(tmp_path / "corpora" / "c"),)).fingerprint()


def test_texts_beside_rows_are_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(50)))
    assert list(Sources((str(tmp_path),)).warnings()) == []
    (tmp_path / "README.md").write_text("# Dataset card\n")
    (warning,) = Sources((str(tmp_path),)).warnings()
    assert "read as one text each" in warning
    assert "README.md" in warning
    (tmp_path / "code.py").write_text("pass\n" * 1000)  # then the rows may be what is beside
    assert list(Sources((str(tmp_path),)).warnings()) == []


@pytest.mark.parametrize("size", [100, 5 << 20])
def test_a_binary_file_is_no_text(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.npy").write_bytes(b"\x01\0" * size)
    for separator in (None, "x"):
        sources = Sources((str(tmp_path),), document_separator=separator)
        assert prepare(Request(sources, "byte", tmp_path / f"c{separator}", 0.5)).manifest.skipped == {"binary": 1}


def test_a_text_of_another_encoding_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a text" * 9)
    (tmp_path / "b.txt").write_bytes("a text".encode("utf-16"))
    (tmp_path / "c.txt").write_text("one \0 in many" + " letters" * 99)
    result = prepare(Request(Sources((str(tmp_path / "*.txt"),)), "byte", tmp_path / "c", 0.5))
    assert result.manifest.skipped == {"not UTF-8": 1}
    assert "1 of 3 texts are not UTF-8 or binary, and left out; the first: " in caplog.text


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"a text")
    assert texts_of(tmp_path / "a.txt") == ["a text"]
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"one|two" + b" " * (5 << 20))
    assert texts_of(tmp_path / "b.txt", separator="|")[0] == "one"
