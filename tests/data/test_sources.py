"""Sources: every kind of file gives the same documents, in a fixed order, and bad rows are named."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from plumbline.data.inputs.reading import Reading, unescaped
from plumbline.data.inputs.records import read_records
from plumbline.data.sources import Sources
from tests.data.reading import TEXTS, json_lines, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes(TEXTS[0].encode())
    (tmp_path / "b" / "c.md").write_bytes(TEXTS[1].encode())
    (tmp_path / "b" / "deep" / "d.py").write_bytes(TEXTS[2].encode())
    for hidden in (".git/config", "b/__pycache__/c.txt", "site-packages/x.py"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("not wanted")
    return tmp_path


def test_a_folder_is_read_in_order_of_names(folder: Path) -> None:
    assert read(folder) == (TEXTS, {})


def test_files_globs_and_several_sources(folder: Path) -> None:
    assert read(folder / "b/c.md", folder / "a.txt")[0] == [TEXTS[1], TEXTS[0]]
    assert read(f"{folder}/b/**/*.[mp]*")[0] == TEXTS[1:]
    assert read(f"{folder}/b/**/**/*.[mp]*")[0] == TEXTS[1:]  # Python's glob gives the files twice


def test_rows_of_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(*TEXTS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(*TEXTS)))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2, 3]}), tmp_path / "c.parquet")
    assert read(tmp_path) == (TEXTS * 3, {})
    pyarrow.parquet.write_table(pyarrow.table({"a.b": TEXTS}), tmp_path / "dots.parquet")
    assert read(tmp_path / "dots.parquet", text_key="a.b")[0] == TEXTS
    (tmp_path / "d.jsonl").write_bytes(json_lines(*TEXTS, key="body"))
    assert read(tmp_path / "d.jsonl", text_key="body")[0] == TEXTS


def test_rows_by_the_names_that_others_give_them(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_bytes(json_lines(*TEXTS))
    (tmp_path / "b.JSONL").write_bytes(json_lines(*TEXTS))
    (tmp_path / "c.NDJSON.GZ").write_bytes(gzip.compress(json_lines(*TEXTS)))
    (tmp_path / "d.json").write_bytes(json_lines(*TEXTS))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "e.PARQUET")
    (tmp_path / "f.jsonlines").write_bytes(json_lines(*TEXTS))
    (tmp_path / "g.jl").write_bytes(json_lines(*TEXTS))
    (tmp_path / "h.jl.gz").write_bytes(gzip.compress(json_lines(*TEXTS)))
    assert read(tmp_path) == (TEXTS * 8, {})


def test_json_of_lines_that_are_objects_is_rows_whatever_their_fields(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json_lines(*TEXTS, key="body"))
    assert read(tmp_path, text_key="body")[0] == TEXTS
    with pytest.raises(ValueError, match=r"a\.json:1: no field 'text' \(fields: body, id\); .* --text-key"):
        read(tmp_path)


def test_an_array_of_objects_is_not_read_as_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n  {"text": "one"},\n  {"text": "two"}\n]\n')
    for spec in (tmp_path / "a.json", tmp_path / "*.json"):
        with pytest.raises(
            ValueError, match=r"a\.json: one array of JSON objects, .*: write it as \.jsonl, one object"
        ):
            read(spec)


@pytest.mark.parametrize(
    "text",
    ['{"text":\n"one"}\n', "\n\n{\n", '{"name": "a package"}\n', "{}", '["title"]\n{"title": "two"}\n', "[1]\n", "{\n"],
)
def test_any_other_json_is_a_document(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path) == ([text], {})


def test_a_name_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    for ending in ("txt", "jsonl"):
        (tmp_path / os.fsdecode(f"caf\xe9.{ending}".encode("latin-1"))).write_bytes(json_lines(*TEXTS))
    assert Sources((str(tmp_path),)).listed().fingerprint()
    assert read(tmp_path)[0] == [*TEXTS, json_lines(*TEXTS).decode()]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl.zst"])
def test_a_name_that_pyarrow_does_not_open_is_no_damage(tmp_path: Path, ending: str) -> None:
    (tmp_path / os.fsdecode(f"caf\xe9.{ending}".encode("latin-1"))).write_bytes(b"-")
    with pytest.raises(ValueError, match=rf"{ending}: has a name that is not UTF-8, .*; rename it"):
        read(tmp_path)


def test_a_separator_is_typed_as_python_writes_it() -> None:
    assert unescaped(r"\r\n\t|\\newpage|\x") == "\r\n\t|\\newpage|\\x"


def test_compressed_lines(tmp_path: Path) -> None:
    with pyarrow.output_stream(tmp_path / "a.jsonl.zst", compression="zstd") as file:
        file.write(json_lines(*TEXTS))
    frame = (tmp_path / "a.jsonl.zst").read_bytes()
    (tmp_path / "a.jsonl.zst").write_bytes(frame + frame)  # written by appending
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json_lines(*TEXTS)))
    assert read(tmp_path) == (TEXTS * 3, {})
    (tmp_path / "a.jsonl.zst").write_bytes(frame[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: not a whole zstd file"):
        read(tmp_path / "a.jsonl.zst")


def test_a_window_of_zstd_that_is_too_large_is_no_damage(tmp_path: Path) -> None:
    """A frame of one raw block: what its third field says of the window is 2 GiB, as of `zstd --long=31`."""
    block = json_lines("one")
    header = b"\x28\xb5\x2f\xfd" + b"\x00" + b"\xa8" + (len(block) << 3 | 1).to_bytes(3, "little")
    (tmp_path / "a.jsonl.zst").write_bytes(header + block)
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: packed with a window that is not read \(.*\); pack it again"):
        read(tmp_path)
    (tmp_path / "a.jsonl.zst").write_bytes(header.replace(b"\xa8", b"\x38") + block)
    assert read(tmp_path)[0] == ["one"]


def test_arrow_files_of_both_formats(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS, "id": [1, 2, 3]})
    for name, new in (("a.arrow", pyarrow.ipc.new_file), ("b.arrow", pyarrow.ipc.new_stream)):
        with new(str(tmp_path / name), table.schema) as writer:
            for batch in table.to_batches(max_chunksize=2):
                writer.write_batch(batch)
    assert read(tmp_path) == (TEXTS * 2, {})
    with pytest.raises(ValueError, match=r"b\.arrow: no field 'body' \(fields: text, id\)"):
        read(tmp_path / "b.arrow", text_key="body")
    (tmp_path / "c.arrow").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"c\.arrow: not an Arrow file"):
        read(tmp_path / "c.arrow")


def test_lines_of_utf_16_are_none_of_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(*TEXTS).decode().encode("utf-16"))
    assert read(tmp_path / "a.jsonl")[0] == []
    assert read(tmp_path / "a.jsonl")[1].keys() == {"not UTF-8"}
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + json_lines(*TEXTS))
    assert read(tmp_path / "a.jsonl")[0] == TEXTS


def test_the_text_of_several_fields(tmp_path: Path) -> None:
    rows = [{"title": "A", "meta": {"body": {"de": "b"}}, "year": 1999}, {"title": None, "meta": None, "year": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    assert read(tmp_path, template="{title} ({year})\n{{}}") == (["A (1999)\n{}"] * 2, {"empty": 2})
    assert read(tmp_path / "b.parquet", text_key="title")[0] == ["A"]
    assert read(tmp_path, text_key="meta.body.de") == (["b"] * 2, {"empty": 2}), "null has no fields to miss"
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no field 'meta\.body\.en'"):
        read(tmp_path / "a.jsonl", text_key="meta.body.en")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no field 'title\.de'"):
        read(tmp_path / "a.jsonl", text_key="title.de")
    with pytest.raises(ValueError, match="no field 'autor'"):
        read(tmp_path / "a.jsonl", template="{autor}")
    for wrong in ("no field", "{title.__class__}", "{title!r}", "{title", "{}"):
        with pytest.raises(ValueError, match="--text-template"):
            Reading(template=wrong)


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_lines_are_read_once_however_a_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("plumbline.data.inputs.files.UNIT_BYTES", size)
    texts = ["x" * (number * number % 37 + 1) for number in range(30)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(*texts).replace(b"\n", b"\n\n", 5).rstrip(b"\n"))
    assert read(tmp_path / "a.jsonl")[0] == texts


def test_large_files_are_cut_at_separators_as_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one\n\n\ntwo\n\n\n\n\nthree é\n\n" + "long " * 20 + "\n\nend"
    (tmp_path / "a.txt").write_text(text)
    small = read(tmp_path / "a.txt", separator="\n\n")
    monkeypatch.setattr("plumbline.data.inputs.files.PART_BYTES", 10)
    for block in (1, 2, 3, 5, 1000):
        monkeypatch.setattr("plumbline.data.inputs.texts.BLOCK_BYTES", block)
        assert read(tmp_path / "a.txt", separator="\n\n") == small
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff")
    assert read(tmp_path / "a.txt", separator="\n\n") == ([], {"not UTF-8": 1})


def test_separator_cuts_plain_text_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\nthree")
    (tmp_path / "b.jsonl").write_bytes(json_lines("x\n\ny"))
    assert read(tmp_path, separator="\n\n") == (["one", "two", "three", "x\n\ny"], {"empty": 1})


def test_what_is_not_text_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_bytes(b" \n\t")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b"good")
    (tmp_path / "e.jsonl").write_bytes(b'{"text": "caf\xe9"}\n\n{"text": "half \\ud83d pair"}\n{"text": null}\n')
    assert read(tmp_path) == (["good"], {"not UTF-8": 3, "empty": 3})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl:2: not JSON \(.* at column 13\)"),
        (
            b'{"txt": "a", "id": 3}',
            r"a\.jsonl:2: no field 'text' \(fields: txt, id\); name the right one with --text-key",
        ),
        (b'[{"text": "a"}]', r"a\.jsonl:2: the row is list, expected an object with field 'text': write one object a"),
        (b"7", r"a\.jsonl:2: the row is int, expected an object"),
        (b'{"text": 7}', r"a\.jsonl:2: field 'text' is int, expected text"),
        (b'{"text": ' + b"7" * 5000 + b"}", r"a\.jsonl:2: not JSON \(Exceeds the limit"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines("fine") + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_column_that_is_not_utf8_costs_its_rows_alone(tmp_path: Path) -> None:
    texts = pyarrow.array([b"one", b"caf\xe9", b"two"]).cast(pyarrow.binary())
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.utf8(), 3, texts.buffers())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "a.parquet", tmp_path / "b.arrow") == (["one", "two"] * 2, {"not UTF-8": 2})


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(json_lines(*TEXTS * 1000))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: not a whole gzip file"):
        read(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(json_lines("plain"))
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz: not a whole gzip file"):
        read(tmp_path / "b.jsonl.gz")
    (tmp_path / "C.JSONL.GZ").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"C\.JSONL\.GZ: not a whole gzip file"):
        read(tmp_path / "C.JSONL.GZ")
    for name in ("empty.jsonl.gz", "empty.jsonl.zst"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"{name}: not a whole .* \(it is empty\); copy it again"):
            read(tmp_path / name)
    for name in ("c.parquet", "C.PARQUET"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ValueError, match=rf"{name}: not a parquet file"):
            read(tmp_path / name)
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d\.parquet: no field 'text' \(fields: body\)"):
        read(tmp_path / "d.parquet")


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("missing.txt", "give a file"),
        ("missing/*.txt", "give a file"),
        ("http://x", "pipes and URLs are not read"),
        ("-", "pipes and URLs are not read"),
    ],
)
def test_a_source_that_matches_nothing_is_refused(spec: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"no file matches; {remedy}"):
        Sources((spec,)).listed().fingerprint()


def test_fingerprint_notices_changed_and_new_files(folder: Path) -> None:
    sources = Sources((str(folder),))
    before = sources.listed().fingerprint()
    assert sources.listed().fingerprint() == before
    (folder / "a.txt").write_text("changed")
    changed = sources.listed().fingerprint()
    (folder / "new.txt").write_text("new")
    grown = sources.listed().fingerprint()
    os.utime(folder / "new.txt", ns=(0, 0))  # written again, to the same size
    assert len({before, changed, grown, sources.listed().fingerprint()}) == 4


def test_the_standard_library_is_there() -> None:
    sources = Sources(("stdlib",))
    unit = next(sources.listed().units())
    first = [record.text for record, _ in zip(read_records(sources.reading, unit), range(200), strict=False)]
    assert any("def " in (text or "") for text in first)
    assert first == [record.text for record, _ in zip(read_records(sources.reading, unit), range(200), strict=False)]


def test_a_table_is_not_read_as_one_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "text.txt").write_text("one")
    for spec in (tmp_path / "rows.csv", tmp_path / "*"):
        with pytest.raises(ValueError, match=r"rows\.csv: a table, which would be read as one text"):
            list(Sources((str(spec),)).listed().units())
    assert len(list(Sources((str(tmp_path),)).listed().units())) == 1, "in a folder of text it is text"


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.bz2", "a.zip", "a.tar.zst", "a.JSONL.XZ"])
def test_what_is_packed_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match=rf"{name}: is packed, and of such files .*\.jsonl\.gz.* are read: unpack it"):
        list(Sources((str(tmp_path / "*"),)).listed().units())


def test_what_a_folder_holds_beside_text_is_told_with_counts(folder: Path) -> None:
    assert list(Sources((str(folder), str(folder / "a.txt"), "stdlib")).listed().warnings()) == []
    for name in ("b/rows.csv", "b/rows.jsonl.bz2", "b/z.tar"):
        (folder / name).write_text("a,b")
    (folder / "array.json").write_text('[{"text": "one"}]')
    (folder / "elsewhere").symlink_to(folder / "b")
    (folder / "broken").symlink_to(folder / "nothing")
    (warning,) = Sources((str(folder),)).listed().warnings()
    assert warning.startswith(f"source {folder}: links to folders or to nothing are not followed: name their targets")
    assert f"(2, such as {folder}/broken); packed files are left out: unpack them (2, such as {folder}/b/ro" in warning
    assert (
        f"tables are read as one text each: write them as .jsonl or .parquet (1, such as {folder}/b/rows.c" in warning
    )
    assert "arrays of JSON objects are read as one text each: write them as .jsonl (1, such as" in warning
    assert read(folder) == ([TEXTS[0], '[{"text": "one"}]', TEXTS[1], TEXTS[2], "a,b"], {"packed": 2})


def test_a_folder_of_links_alone_says_why_nothing_is_read(tmp_path: Path, folder: Path) -> None:
    (folder / "links" / "a").mkdir(parents=True)
    (folder / "links" / "b").symlink_to(folder / "b")
    with pytest.raises(
        ValueError, match=r"no file matches \(links to folders .* \(1, such as .*links/b\)\); give a file"
    ):
        Sources((str(folder / "links"),)).listed().fingerprint()


def test_a_folder_that_a_glob_matches_is_refused_unless_it_goes_down(folder: Path) -> None:
    (folder / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"source .*\*: matches .*/b, a folder, and none of the files in it: name"):
        Sources((f"{folder}/*",)).listed().fingerprint()
    assert read(f"{folder}/b/deep/*", f"{folder}/*.txt")[0] == [TEXTS[2], TEXTS[0]]
    assert read(f"{folder}/b/**/*.*")[0][:1] == ["not wanted"], "a glob says itself what is wanted"


def test_a_text_that_two_sources_name_is_refused(folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder / "a.txt")
    for specs in (
        (f"{folder}/[ab].txt", f"{folder}/link.txt"),
        (str(folder), f"{folder}/b/c.md"),
        ("hf:x", "hf:x::train"),
    ):
        with pytest.raises(
            ValueError, match=r"source .*: both name .*, whose text would be there twice: leave one out"
        ):
            Sources(specs).listed().fingerprint()
    assert Sources((f"{folder}/a.txt", f"{folder}/b", "hf:x", "hf:x::test")).listed().fingerprint()
