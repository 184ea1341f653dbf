"""Duplicates: the first stays, and what is only alike stays as well, unless near ones are asked for."""

import json
import random
import resource
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest

from plumbline.data.corpus import open_corpus
from plumbline.data.preparation.available import available_bytes
from plumbline.data.preparation.duplicates import SORTED, first_ones, normalised
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources

DRAW = random.Random(0)
WORDS = [f"word{number}" for number in range(500)]


def text_of(words: int) -> list[str]:
    return DRAW.choices(WORDS, k=words)


def kept(tmp_path: Path, texts: list[str], mode: str | None, workers: int = 1) -> tuple[set[str], dict[str, int]]:
    """Return the documents of a corpus, and what was left out."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    request = Request(
        Sources((str(tmp_path / "a.jsonl"),)), "byte", tmp_path / "c", 0.2, workers=workers, deduplicate=mode
    )
    manifest = prepare(request).manifest
    found = set()
    for split in open_corpus(tmp_path / "c").splits.values():
        tokens = split.indexed.read(0, split.num_tokens)
        starts = split.indexed.document_starts(0, split.num_tokens).tolist()
        found |= {
            bytes(tokens[begin : end - 1].tolist()).decode()
            for begin, end in zip([0, *starts], [*starts, split.num_tokens], strict=True)
        }
    return found, manifest.skipped


def test_white_space_and_composition_make_no_difference() -> None:
    assert normalised(" e\u0301t\u00e9\u00a0 \r\n\tx ") == "\u00e9t\u00e9 x"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_of_equal_documents_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("plumbline.data.inputs.files.UNIT_BYTES", 500)
    texts = [f"Text  número {number}\n" for number in range(50)]
    copies = [f" Text nu\u0301mero   {number}" for number in range(20, 30)]
    found, skipped = kept(tmp_path, [*texts, *copies, "text número 20"], "exact", workers=workers)
    assert found == {*texts, "text número 20"}
    assert skipped == {"duplicate": 10}


def test_no_file_stays_open_while_others_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plumbline.data.inputs.files.UNIT_BYTES", 20)  # a unit for each document
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, limits[1]))
    try:
        found, _ = kept(tmp_path, [f"text number {number}" for number in range(100)], "exact")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(found) == 100


def test_copies_stay_unless_they_are_to_go(tmp_path: Path) -> None:
    found, skipped = kept(tmp_path, [*map(str, range(40)), "7", " 7"], None)
    assert found == {*map(str, range(40)), " 7"}
    assert skipped == {}


def test_near_duplicates(tmp_path: Path) -> None:
    originals = [text_of(300) for _ in range(30)]
    near = [[*words[:150], "another", *words[150:]] for words in originals[:10]]  # shares 98 % of its runs
    half = [[*words[:150], *text_of(150)] for words in originals[10:20]]  # shares a third
    symbols = ["!!!", "???"]
    texts = [" ".join(words) for words in (*originals, *near, *half)]
    found, skipped = kept(tmp_path, [*texts, *symbols], "near")
    assert found == {*texts[:30], *texts[40:], *symbols}
    assert skipped == {"near duplicate": 10}


def test_a_tokenizer_does_not_train_on_what_is_removed(tmp_path: Path) -> None:
    texts = [" ".join(text_of(30)) for _ in range(60)]
    for name, all_texts in (("once", texts), ("thrice", [*texts, *(f" {text}" for text in texts), *texts])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in all_texts))
        source = Sources((str(tmp_path / f"{name}.jsonl"),))
        prepare(Request(source, "train-bpe:400", tmp_path / name, 0.2, deduplicate="exact"))
    for file in ("tokenizer/tokenizer.json", "train.bin", "validation.bin"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "thrice" / file).read_bytes()


def test_more_documents_than_memory_holds_are_refused_before_they_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text number {number}" for number in range(100)]
    monkeypatch.setattr("plumbline.data.preparation.duplicates.available_bytes", lambda: 100 * 50 - 1)
    words = (
        r"--deduplicate exact: 100 documents need about 0\.0 GB of memory at once, and 0\.0 GB are available; .*--mem"
    )
    with pytest.raises(ValueError, match=words):
        kept(tmp_path, texts, "exact")
    assert len(kept(tmp_path, texts, None)[0]) == 100
    monkeypatch.setattr("plumbline.data.preparation.duplicates.available_bytes", lambda: 100 * 50)
    shutil.rmtree(tmp_path / "c")
    assert len(kept(tmp_path, texts, "exact")[0]) == 100


@pytest.mark.parametrize("columns", [1, 2])
def test_sorting_takes_no_more_memory_than_is_asked_for(columns: int) -> None:
    count = 200_000
    hashes = np.random.default_rng(0).integers(0, 2**63, (columns, 10, count // 10)).astype(np.uint64)
    tracemalloc.start()
    first_ones(lambda column: (hashes[column, unit].copy() for unit in range(10)), columns)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert SORTED - 5 < peak / count < SORTED + 2


def test_memory_is_what_all_groups_of_a_process_leave(tmp_path: Path) -> None:
    own, free = tmp_path / "own", psutil.virtual_memory().available
    own.write_text("1:name=systemd:/elsewhere\n0::/job/step\n")
    assert available_bytes(tmp_path, own) > free / 2, "no group has a limit"
    for group, limit, current in (("job", "1000", 900), ("job/step", "max", 500)):
        (tmp_path / group).mkdir()
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / group / "memory.current").write_text(f"{current}\n")
        (tmp_path / group / "memory.stat").write_text("anon 400\nfile 470\ninactive_file 150\nactive_file 250\n")
    assert available_bytes(tmp_path, own) == 500, "pages of files are given up"
    (tmp_path / "job" / "step" / "memory.max").write_text("450")
    assert available_bytes(tmp_path, own) == 350
    (tmp_path / "job" / "step" / "memory.max").write_text("50")
    assert available_bytes(tmp_path, own) == 0
