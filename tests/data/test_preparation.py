"""The work of prepare.py: in shards, by any number of processes, after any kill, always the same bytes."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest

from plumbline.data import prepare as prepare_module
from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import read_records
from plumbline.data.manifest import Manifest
from plumbline.data.preparation import filling
from plumbline.data.preparation.survey import survey_unit as original_survey
from plumbline.data.preparation.verifying import verify
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from tests.data.test_prepare import command, files, leftovers, wait_for_the_end_of


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let little text be many units, pieces and shards."""
    monkeypatch.setattr("plumbline.data.preparation.filling.PIECE_BYTES", 2000)
    monkeypatch.setattr("plumbline.data.inputs.files.UNIT_BYTES", 10_000)


def make(source: object, output: Path, tokenizer: str = "byte", **changes: Any) -> Manifest:
    return prepare(Request(Sources((str(source),)), tokenizer, output, **changes)).manifest


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def every_kind(text_folder: Path, tmp_path: Path) -> Path:
    """Write the documents of one folder in every kind of file."""
    texts = [path.read_bytes().decode() for path in sorted(text_folder.iterdir())]
    folder = tmp_path / "kinds"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.output_stream(folder / "c.jsonl.zst", compression="zstd") as file:
        file.write(lines)
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=25)
    with pyarrow.ipc.new_file(str(folder / "e.arrow"), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=7):
            writer.write_batch(batch)
    for number, text in enumerate(texts):
        (folder / f"f{number:02}.txt").write_bytes(text.encode())
    return folder


@pytest.mark.usefixtures("small_pieces")
def test_the_number_of_workers_changes_no_shard(every_kind: Path, tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        make(every_kind, tmp_path / str(workers), "train-bpe:400", workers=workers, shard_bytes=30_000)
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")


@pytest.mark.usefixtures("small_pieces")
def test_inputs_that_cannot_be_cut_are_shared_out_or_not(
    every_kind: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plumbline.data.preparation.filling.FEED_BELOW", 0)
    make(every_kind, tmp_path / "whole", workers=2)
    monkeypatch.setattr("plumbline.data.preparation.filling.FEED_BELOW", 10**6)
    make(every_kind, tmp_path / "fed", workers=2)
    assert files(tmp_path / "whole") == files(tmp_path / "fed")


@pytest.mark.usefixtures("small_pieces")
def test_shards_hold_the_tokens_of_one_pair(every_kind: Path, tmp_path: Path) -> None:
    whole = make(every_kind, tmp_path / "whole", validation_fraction=0.2)
    shards = make(every_kind, tmp_path / "shards", validation_fraction=0.2, shard_bytes=20_000)
    assert len(shards.splits["train"].shards) > 10
    assert shards.splits["train"].shards[:2] == ["train-00000", "train-00001"]
    assert set(shards.files) == {
        f"{name}.{end}" for split in shards.splits.values() for name in split.shards for end in ("bin", "idx")
    }
    assert shards.unigram_entropy == whole.unigram_entropy
    assert shards.sources == whole.sources
    assert verify(tmp_path / "shards")[1] == []
    for name, split in open_corpus(tmp_path / "whole").splits.items():
        again = open_corpus(tmp_path / "shards").splits[name]
        assert again.indexed.read(0, again.num_tokens).tolist() == split.indexed.read(0, split.num_tokens).tolist()
        starts = again.indexed.document_starts(0, again.num_tokens).tolist()
        assert starts == split.indexed.document_starts(0, split.num_tokens).tolist()
    sizes = [(tmp_path / "shards" / f"train-{n:05}.bin").stat().st_size // 2 for n in range(10)]
    assert all(10_000 < size < 30_000 for size in sizes), "a shard ends with the piece that fills it"
    assert (
        prepare(Request(Sources((str(every_kind),)), "byte", tmp_path / "shards", 0.2, shard_bytes=20_000)).seconds
        is None
    )
    with pytest.raises(ValueError, match="--shard-size was 20000, now not given"):
        make(every_kind, tmp_path / "shards", validation_fraction=0.2)


def killed(count: int, function: str, action: Callable[[], object], module: ModuleType = filling) -> None:
    """Do something in a process that kills itself before a function is called once more than `count` times."""

    def run() -> None:
        original: Callable[..., Any] = getattr(module, function)
        calls = iter(range(count))

        def counted(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(module, function, counted)
        action()

    process = get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def spoil(path: Path) -> None:
    """Replace what is in a file by as many bytes of something else, without a trace."""
    status = path.stat()
    path.write_bytes(b"\xff" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def ten_files(tmp_path: Path) -> Path:
    folder = tmp_path / "lines"
    folder.mkdir()
    for number in range(10):
        write_lines(folder / f"{number}.jsonl", [f"document {number} {row} " + "word " * row for row in range(60)])
    return folder


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("count", "function"),
    [(4, "survey_unit"), (0, "build_tokenizer"), (0, "encode_unit"), (23, "encode_unit"), (3, "write_shard"),
     (0, "Filled"), (0, "finish")],
)  # fmt: skip
def test_a_killed_run_is_gone_on_with(
    ten_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, function: str
) -> None:
    make(ten_files, tmp_path / "whole", "train-bpe:300", shard_bytes=15_000)
    request = Request(Sources((str(ten_files),)), "train-bpe:300", tmp_path / "c", shard_bytes=15_000)
    killed(count, function, partial(prepare, request), prepare_module if function == "finish" else filling)
    assert [path.suffix for path in leftovers(tmp_path)] == [".partial", ".lock"]
    surveyed = []

    def survey_unit(job: Any, number: int, *rest: Any) -> None:
        surveyed.append(number)
        original_survey(job, number, *rest)

    monkeypatch.setattr(filling, "survey_unit", survey_unit)
    prepare(request)
    assert surveyed == (list(range(4, 20)) if function == "survey_unit" else []), "what was surveyed is not read again"
    assert files(tmp_path / "c") == files(tmp_path / "whole")
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("small_pieces")
def test_finished_inputs_are_not_read_again(ten_files: Path, tmp_path: Path) -> None:
    make(ten_files, tmp_path / "whole", shard_bytes=15_000)
    request = Request(Sources((str(ten_files),)), "byte", tmp_path / "c", shard_bytes=15_000)
    killed(4, "write_shard", partial(prepare, request))
    for number in range(4):
        spoil(ten_files / f"{number}.jsonl")
    prepare(request)
    assert files(tmp_path / "c") == files(tmp_path / "whole")


@pytest.mark.usefixtures("small_pieces")
def test_tokens_of_an_unfinished_shard_are_kept(ten_files: Path, tmp_path: Path) -> None:
    make(ten_files, tmp_path / "whole")
    request = Request(Sources((str(ten_files),)), "byte", tmp_path / "c")
    killed(35, "encode_unit", partial(prepare, request))
    for number in range(4):
        spoil(ten_files / f"{number}.jsonl")
    prepare(request)
    assert files(tmp_path / "c") == files(tmp_path / "whole")


def test_another_request_starts_anew(ten_files: Path, tmp_path: Path) -> None:
    killed(0, "encode_unit", partial(make, ten_files, tmp_path / "c"))
    (ten_files / "0.jsonl").write_text('{"text": "changed"}')
    make(ten_files, tmp_path / "c")
    assert leftovers(tmp_path) == []
    make(ten_files, tmp_path / "whole")
    assert files(tmp_path / "c") == files(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_no_process_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    source = tmp_path / "long.txt"
    source.write_text("".join(f"document {number} says nothing much\n" for number in range(400_000)))
    arguments = ("--source", source, "--document-separator", "\\n", "--tokenizer", "byte", "--workers", 2)
    output = tmp_path / "corpora" / "c"
    hears = ("env", "--default-signal=INT")  # which a shell's background jobs, and so these tests, may ignore
    process = subprocess.Popen(
        [*hears, *command(*arguments, "--output", output)], start_new_session=True, stderr=subprocess.DEVNULL
    )
    while not list(output.parent.glob(".c.*/.work/units/*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)  # to the parent alone, as the kernel does when memory is short
    assert process.wait() == (130 if number == signal.SIGINT else -number)
    wait_for_the_end_of(process.pid)
    assert leftovers(output.parent)[0].suffix == ".partial"
    again = subprocess.run(command(*arguments, "--output", output), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert leftovers(output.parent) == []
    assert verify(output)[1] == []


def test_a_source_that_changes_meanwhile_is_noticed(ten_files: Path, tmp_path: Path) -> None:
    request = Request(Sources((str(ten_files),)), "byte", tmp_path / "c")
    killed(0, "encode_unit", partial(prepare, request))
    spoil(ten_files / "9.jsonl")
    with pytest.raises(ValueError, match="the source changed while it was being read"):
        prepare(request)
    assert not (tmp_path / "c").exists()


def test_a_hub_that_is_away_for_a_while_costs_no_work(
    ten_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(Sources((f"hf:{ten_files}",)), "byte", tmp_path / "c")
    killed(0, "encode_unit", partial(prepare, request))
    work, _lock = leftovers(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("datasets.load_dataset", Mock(side_effect=ConnectionError("Couldn't reach the hub")))
        with pytest.raises(OSError, match="Couldn't reach the hub; see to the network"):
            prepare(request)
    assert leftovers(tmp_path) == [work]
    monkeypatch.setattr(filling, "survey_unit", None)  # all of them are surveyed
    prepare(request)
    assert leftovers(tmp_path) == []


def test_a_tokenizer_that_cannot_be_had_is_told_before_any_text_is_read(
    ten_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "survey_unit", None)
    (tmp_path / "t").mkdir()
    with pytest.raises(
        ValueError, match=f"--tokenizer {tmp_path}/t: has none of tokenizer.json, tokenizer_config.json"
    ):
        make(ten_files, tmp_path / "c", str(tmp_path / "t"))
    (tmp_path / "t" / "tokenizer.json").touch()
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}/t: cannot be read"):
        make(ten_files, tmp_path / "c", str(tmp_path / "t"))
    monkeypatch.setattr("plumbline.data.tokenizer_making.is_reachable", lambda: False)
    with pytest.raises(OSError, match=r"--tokenizer hf:no/such: cannot be read: .*; the hub cannot be reached: give a"):
        make(ten_files, tmp_path / "c", "hf:no/such")


@pytest.mark.usefixtures("small_pieces")
def test_bad_records_are_named_and_counted(ten_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are those of the file, of which each unit is a part."""
    monkeypatch.setattr("plumbline.data.inputs.files.UNIT_BYTES", 2000)
    lines = (ten_files / "3.jsonl").read_text().splitlines()
    lines[40] = '{"text": 7}'
    lines[55] = '{"text": '
    lines[57] = '{"body": ""}'
    (ten_files / "3.jsonl").write_text("\n".join(lines))
    (ten_files / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "good"}).encode() * 1000)[:-4])
    (ten_files / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"3\.jsonl:41: field 'text' is int, expected text"):
        make(ten_files, tmp_path / "c", workers=2)
    manifest = make(ten_files, tmp_path / "c", workers=2, skip_bad=True)
    assert manifest.skipped == {"not text": 1, "not JSON": 1, "no field": 1, "damaged file": 1, "not UTF-8": 1}
    where = [bad.removeprefix(f"{ten_files}/").split(": ")[0] for bad in manifest.bad_records]
    assert where == ["3.jsonl:41", "3.jsonl:56", "3.jsonl:58", "a.jsonl.gz", "b.txt"]
    assert "not a whole gzip file, read up to the damage (" in manifest.bad_records[3]
    assert sum(split.documents for split in manifest.splits.values()) == 597


def test_where_all_is_left_out_the_error_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "b.txt").write_bytes(b" ")
    left_out = r", 1 left out \(damaged file\), 1 left out \(empty\); the first: .*a\.jsonl\.gz: not a whole gzip"
    with pytest.raises(ValueError, match=rf"no document to read: there is none in any source .*{left_out}"):
        make(tmp_path, tmp_path / "c", skip_bad=True)


def test_a_separator_that_cuts_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three")
    for separator, told in (("\n\n", ""), ("\r\n", r"--document-separator '\r\n' stands in none of 2 files of text")):
        caplog.clear()
        prepare(
            Request(
                Sources((str(tmp_path),), Reading("text", separator)),
                "byte",
                tmp_path.with_suffix(f".{bool(told)}"),
                0.2,
            )
        )
        assert told in caplog.text
        assert bool(told) == ("--document-separator" in caplog.text)


def test_counts_by_source_add_up(ten_files: Path, text_folder: Path, tmp_path: Path) -> None:
    sources = Sources((str(ten_files), str(text_folder)))
    manifest = prepare(Request(sources, "byte", tmp_path / "c", 0.2)).manifest
    assert sum(counts.documents for counts in manifest.sources[str(ten_files)].values()) == 600
    assert sum(counts.documents for counts in manifest.sources[str(text_folder)].values()) == 60
    for split, record in manifest.splits.items():
        assert sum(counts[split].tokens for counts in manifest.sources.values()) == record.tokens


def lines_of(megabytes: int) -> Iterator[str]:
    for number in range(megabytes * 10_000):
        yield f"{number:08} is a line that says nothing, in a hundred bytes, as all the others here do it as well.\n"


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = {}
    for megabytes in (5, 150):
        source = tmp_path / f"{megabytes}.txt"
        with source.open("w") as file:
            lines = lines_of(megabytes)
            while block := list(islice(lines, 10_000)):
                file.writelines(block)
        arguments = ("--source", source, "--tokenizer", "byte", "--workers", 1, "--output", tmp_path / f"c{megabytes}")
        process = subprocess.Popen(
            [sys.executable, *command(*arguments)[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0
        peaks[megabytes] = usage.ru_maxrss / 1024
        source.unlink()
    assert read_manifest(tmp_path / "c150").splits["train"].documents == 1
    assert peaks[150] - peaks[5] < 40, peaks


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_line_that_no_memory_holds_is_a_bad_record(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plumbline.data.inputs.lines.LONGEST_LINE", 100)
    lines = [json.dumps({"text": "x" * size}).encode() for size in (87, 1000)]
    with pyarrow.CompressedOutputStream(
        str(tmp_path / f"a.jsonl.{ending}"), {"gz": "gzip", "zst": "zstd"}[ending]
    ) as file:
        file.write(b"\n".join(lines))
    sources = Sources((str(tmp_path),))
    (unit,) = sources.listed().units()
    taken, refused = read_records(sources.reading, unit)
    assert taken.text == "x" * 87
    assert (refused.reason, refused.text) == ("line too long", None)
    assert refused.detail.startswith("line 2 is longer than 100 bytes")
