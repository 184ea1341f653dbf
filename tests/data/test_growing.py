"""Corpora of corpora: appended to, merged, and checked byte by byte."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from plumbline.data import disk
from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.corpus import Corpus, open_corpus, read_manifest
from plumbline.data.heldout import place
from plumbline.data.inputs.reading import Reading
from plumbline.data.loader import TrainBatches
from plumbline.data.preparation.filling import Filled, fill
from plumbline.data.preparation.growing import append, merge
from plumbline.data.preparation.manifest import unigram_entropy
from plumbline.data.preparation.verifying import checked_frequencies, verify
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.streams import training_split
from plumbline.data.workspace import publish_folder
from plumbline.launcher.prepare import main
from tests.data.made import opened_splits
from tests.data.test_preparation import killed
from tests.data.test_prepare import files, leftovers


def source(path: Path, texts: list[str]) -> Sources:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Sources((str(path),))


def documents(corpus: Corpus, split: str) -> list[str]:
    tokens = corpus.splits[split].indexed.read(0, corpus.splits[split].num_tokens)
    starts = corpus.splits[split].indexed.document_starts(0, len(tokens)).tolist()
    return [
        bytes(tokens[begin : end - 1].tolist()).decode()
        for begin, end in zip([0, *starts], [*starts, len(tokens)], strict=True)
    ]


OLD = [f"old document {number}" for number in range(200)]
NEW = [f"new document {number}" for number in range(300)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    prepare(Request(source(tmp_path / "old.jsonl", OLD), "byte", tmp_path / "c", 0.1))
    return tmp_path / "c"


def test_appended_documents_are_held_out_by_the_same_rule(corpus: Path, tmp_path: Path) -> None:
    before, old_files = open_corpus(corpus), files(corpus)
    held_out = documents(before, "validation")
    new = source(tmp_path / "new.jsonl", [*NEW, held_out[0], documents(before, "train")[0]])
    result = append(corpus, new, shard_bytes=2000)
    after = open_corpus(corpus)
    assert verify(corpus)[1] == []
    threshold = int(0.1 * 2**64)
    for split, begin in (("train", documents(before, "train")), ("validation", held_out)):
        found = documents(after, split)
        assert found[: len(begin)] == begin
        assert all((place(text.encode(), 0) < threshold) == (split == "validation") for text in found)
    assert sorted(documents(after, "train") + documents(after, "validation")) == sorted(
        [*OLD, *NEW, held_out[0], documents(before, "train")[0]]
    )
    assert after.manifest == result.manifest
    assert result.manifest.splits["train"].shards[:2] == ["train", "train-00001"]
    assert {name: data for name, data in files(corpus).items() if name in old_files and name != "corpus.json"} == {
        name: data for name, data in old_files.items() if name != "corpus.json"
    }
    assert after.fingerprint != before.fingerprint
    assert result.manifest.unigram_entropy == unigram_entropy(*checked_frequencies(corpus)[1])
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("old", [["one long text, all there was " * 50], ["one", "two", "three"]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_joins_a_few_documents_is_held_out_by_the_share_that_was_asked_for(
    tmp_path: Path, old: list[str], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule of a few put the threshold beside one of them, wherever it was."""
    prepare(Request(source(tmp_path / "old.jsonl", old), "byte", tmp_path / "c", 0.05, seed))
    before = open_corpus(tmp_path / "c")
    caplog.clear()
    append(tmp_path / "c", source(tmp_path / "new.jsonl", [*NEW, *old]))
    assert "of the text is held out" not in caplog.text
    after = open_corpus(tmp_path / "c")
    for split in ("train", "validation"):
        found = documents(after, split)
        copies = documents(before, split)
        assert found[: len(copies)] == copies
        assert found[-len(copies) :] == copies, "copies go where the others went"
        joined = found[len(copies) : -len(copies)]
        assert all((place(text.encode(), seed) < 0.05 * 2**64) == (split == "validation") for text in joined)


def test_a_share_that_is_far_from_what_was_asked_for_is_told(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(corpus, source(tmp_path / "new.jsonl", ["a copy of a text that is trained on"] * 5000))
    assert "0." in caplog.text
    assert "of the text is held out, and --validation-fraction asked for 10.0%" in caplog.text


def test_a_short_text_that_is_held_out_whole_or_not_at_all_is_told(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    append(corpus, source(tmp_path / "both.jsonl", NEW))
    assert "all new text" not in caplog.text
    held_out = next(text for n in range(1000) if place((text := f"short {n}").encode(), 0) < 0.1 * 2**64)
    append(corpus, source(tmp_path / "held.jsonl", [held_out]))
    told = [record for record in caplog.records if "all new text" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
    assert f"(1 document, {len(held_out)} bytes) is held out, and none of it is trained on" in told[0].message
    append(corpus, source(tmp_path / "more.jsonl", ["a text that is trained on"]))
    assert "(1 document, 25 bytes) is trained on, and none of it is held out" in caplog.text


def test_what_was_appended_is_not_appended_again(corpus: Path, tmp_path: Path) -> None:
    new = source(tmp_path / "new.jsonl", NEW)
    append(corpus, new)
    before = files(corpus)
    assert append(corpus, new).seconds is None
    assert files(corpus) == before
    append(corpus, source(tmp_path / "third.jsonl", [f"third {number}" for number in range(50)]))
    assert read_manifest(corpus).splits["train"].shards == ["train", "train-00001", "train-00002"]
    assert len(documents(open_corpus(corpus), "train") + documents(open_corpus(corpus), "validation")) == 550
    with pytest.raises(ValueError, match="holds this corpus, and what was added to it by --append, 2 time"):
        prepare(Request(Sources((str(tmp_path / "old.jsonl"),)), "byte", corpus, 0.1))


@pytest.mark.parametrize("function", ["encode_unit", "Filled"])
def test_an_append_that_was_killed_is_gone_on_with(corpus: Path, tmp_path: Path, function: str) -> None:
    shutil.copytree(corpus, tmp_path / "d")
    new = source(tmp_path / "new.jsonl", NEW)
    append(tmp_path / "d", new, shard_bytes=2000)
    before = files(corpus)
    killed(0, function, partial(append, corpus, new, shard_bytes=2000))
    assert files(corpus) == before
    append(corpus, new, shard_bytes=2000)
    assert files(corpus) == files(tmp_path / "d")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("exchanged", "function", "count"),
    [(True, "move", 0), (True, "exchange", 0), (True, "rmtree", 2),
     (False, "move", 0), (False, "move", 1), (False, "move", 2), (False, "rmtree", 2)],
)  # fmt: skip
def test_a_kill_while_a_corpus_is_replaced_leaves_one_of_the_two(
    corpus: Path, tmp_path: Path, exchanged: bool, function: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process kills itself before the step that is named: where folders cannot be exchanged, there are two more."""
    if not exchanged:
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
    shutil.copytree(corpus, tmp_path / "d")
    new = source(tmp_path / "new.jsonl", NEW)
    append(tmp_path / "d", new)
    before, after = files(corpus), files(tmp_path / "d")
    killed(count, function, partial(append, corpus, new), shutil if function == "rmtree" else disk)
    assert len(leftovers(tmp_path)) == (3 if (exchanged, function, count) == (False, "move", 2) else 2)
    open_corpus(corpus)
    assert files(corpus) == (after if function == "rmtree" else before)
    append(corpus, new)
    assert files(corpus) == after
    if function != "rmtree":  # which is cleaned by the next that makes something
        assert leftovers(tmp_path) == []
    append(corpus, source(tmp_path / "third.jsonl", ["third"] * 3))
    assert leftovers(tmp_path) == []
    open_corpus(corpus)


@pytest.mark.parametrize(("function", "count"), [("exchange", 0), ("rmtree", 3)])
def test_a_damaged_corpus_that_was_replaced_does_not_come_back(
    corpus: Path, tmp_path: Path, function: str, count: int
) -> None:
    """What was finished and what it replaced have the same name at one time or another, and are the same request's."""
    flip(corpus / "train.bin")
    again = Request(Sources((str(tmp_path / "old.jsonl"),)), "byte", corpus, 0.1, overwrite=True)
    killed(count, function, partial(prepare, again), shutil if function == "rmtree" else disk)
    assert bool(verify(corpus)[1]) == (function == "exchange")
    assert len(leftovers(tmp_path)) == 2
    prepare(again)
    assert verify(corpus)[1] == []
    assert leftovers(tmp_path) == []


def test_what_changes_while_it_is_appended_is_not(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, before = source(tmp_path / "new.jsonl", NEW), files(corpus)

    def fill_and_change(*arguments: Any) -> Filled:
        filled = fill(*arguments)
        source(tmp_path / "new.jsonl", NEW[1:])
        return filled

    monkeypatch.setattr("plumbline.data.preparation.growing.fill", fill_and_change)
    with pytest.raises(ValueError, match="the source changed while it was being read"):
        append(corpus, sources)
    assert files(corpus) == before
    assert leftovers(tmp_path) == []


def test_nothing_is_appended_by_no_process(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--workers -3: expected at least 1"):
        append(corpus, source(tmp_path / "new.jsonl", NEW), workers=-3)


def test_two_appends_at_once_do_not_lose_what_one_adds(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes where the first has looked for changes, and not yet replaced the corpus."""
    first, second = source(tmp_path / "1.jsonl", NEW[:50]), source(tmp_path / "2.jsonl", NEW[50:])

    def publish(folder: Path, output: Path) -> None:
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"--output .*/c: another --append is at work on it; run this one again"):
            append(corpus, second)
        publish_folder(folder, output)

    monkeypatch.setattr("plumbline.data.workspace.publish_folder", publish)
    append(corpus, first)
    append(corpus, second)
    assert sum(split.documents for split in read_manifest(corpus).splits.values()) == len(OLD + NEW)
    assert leftovers(tmp_path) == []


def test_nothing_is_appended_to_a_damaged_corpus(corpus: Path, tmp_path: Path) -> None:
    flip(corpus / "train.bin")
    before = files(corpus)
    with pytest.raises(ValueError, match=r"train\.bin: checksum"):
        append(corpus, source(tmp_path / "new.jsonl", NEW))
    assert files(corpus) == before


def test_corpora_of_one_tokenizer_are_merged(corpus: Path, tmp_path: Path) -> None:
    prepare(Request(source(tmp_path / "new.jsonl", NEW), "byte", tmp_path / "d", 0.1, shard_bytes=1))
    before = files(corpus), files(tmp_path / "d")
    result, warnings = merge([corpus, tmp_path / "d"], tmp_path / "both")
    assert warnings == []
    both = open_corpus(tmp_path / "both")
    assert verify(tmp_path / "both")[1] == []
    for split in ("train", "validation"):
        parts = [documents(open_corpus(path), split) for path in (corpus, tmp_path / "d")]
        assert documents(both, split) == parts[0] + parts[1]
        assert both.splits[split].source_bytes == sum(len(text.encode()) for text in parts[0] + parts[1])
    assert (
        both.splits["train"].read(3, 64).inputs.tolist()
        == open_corpus(corpus).splits["train"].read(3, 64).inputs.tolist()
    )
    assert result.manifest.unigram_entropy == unigram_entropy(*checked_frequencies(tmp_path / "both")[1])
    assert (files(corpus), files(tmp_path / "d")) == before
    assert merge([corpus, tmp_path / "d"], tmp_path / "both")[0].seconds is None
    with pytest.raises(ValueError, match="holds another corpus"):
        merge([tmp_path / "d", corpus], tmp_path / "both")
    append(tmp_path / "both", source(tmp_path / "third.jsonl", ["third"] * 3))
    assert read_manifest(tmp_path / "both").splits["train"].shards[-1] == "train-00002"


def test_merges_that_make_no_sense(corpus: Path, tmp_path: Path) -> None:
    new = source(tmp_path / "new.jsonl", NEW)
    prepare(Request(new, "train-bpe:300", tmp_path / "bpe", 0.1))
    with pytest.raises(ValueError, match=r"the tokenizers of .*c and .*bpe differ"):
        merge([corpus, tmp_path / "bpe"], tmp_path / "both")
    with pytest.raises(ValueError, match="is one of the corpora that are merged"):
        merge([corpus, corpus], corpus, overwrite=True)
    with pytest.raises(ValueError, match="expected two corpora or more"):
        merge([corpus], tmp_path / "both")
    assert not (tmp_path / "both").exists()
    prepare(Request(new, "byte", tmp_path / "seed", 0.1, seed=1))
    _, warnings = merge([corpus, tmp_path / "seed"], tmp_path / "both")
    assert "may be held out of one and trained on in the other" in warnings[0]
    with pytest.raises(
        ValueError, match=r"not held out by one rule.* with --tokenizer .*/tokenizer, and --merge the two"
    ):
        append(tmp_path / "both", new)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "tokenizer/tokenizer.json"])
def test_a_flipped_bit_is_found_and_its_file_named(
    corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--verify", str(corpus)])
    assert main() == 0
    assert capsys.readouterr().out.startswith(f"whole: {corpus}, 4 token files")
    flip(corpus / name)
    assert main() == 1
    assert capsys.readouterr().out.startswith(f"damaged: {corpus}/{name}: ")
    (corpus / name).unlink()
    assert verify(corpus)[1] == [f"{name}: is missing"]


def test_only_a_corpus_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no corpus here \(no corpus\.json\)"):
        verify(tmp_path)


def test_a_corpus_that_only_evaluates_grows_and_is_merged(corpus: Path, tmp_path: Path) -> None:
    exam = tmp_path / "exam"
    prepare(Request(source(tmp_path / "exam.jsonl", OLD[:50]), "byte", exam, 1.0))
    assert set(open_corpus(exam).splits) == {"validation"}
    assert sorted(path.name for path in exam.glob("*.bin")) == ["validation.bin"]
    append(exam, source(tmp_path / "more.jsonl", NEW[:20]), shard_bytes=100)
    grown = open_corpus(exam)
    assert (set(grown.splits), verify(exam)[1]) == ({"validation"}, [])
    assert documents(grown, "validation") == [*OLD[:50], *NEW[:20]]
    _, warnings = merge([exam, corpus], tmp_path / "both")
    both = open_corpus(tmp_path / "both")
    assert "split by different rules" in warnings[0]
    assert documents(both, "train") == documents(open_corpus(corpus), "train")
    assert documents(both, "validation")[:70] == documents(grown, "validation")


def test_nothing_trains_on_a_corpus_that_only_evaluates(corpus: Path, tmp_path: Path) -> None:
    exam = tmp_path / "exam"
    prepare(Request(source(tmp_path / "exam.jsonl", OLD), "byte", exam, 1.0))
    with pytest.raises(ValueError, match=r"exam: was prepared with --validation-fraction 1.*data\.validation"):
        training_split(open_corpus(exam))
    data = {"train": [{"path": str(exam)}], "sequence_length": 8, "global_batch_size": 1, "micro_batch_size": 1}
    with pytest.raises(ValueError, match="--validation-fraction 1"):
        TrainBatches(DataConfig.model_validate(data), seed=0)
    data |= {"train": [{"path": str(corpus)}], "validation": [{"path": str(exam)}]}
    (held_out,) = opened_splits(DataConfig.model_validate(data)).values()
    assert held_out.evaluation_windows(8) > 0, "it can be scored on while another corpus trains"


def test_a_text_that_is_there_is_not_put_there_again(corpus: Path, tmp_path: Path) -> None:
    new = source(tmp_path / "new.jsonl", NEW)
    append(corpus, new)
    for again, shard_bytes in ((Sources((str(tmp_path / "old.jsonl"),)), None), (new, 1000)):
        with pytest.raises(
            ValueError, match=r"/c has the text of 1 of 1 files already, such as .*\.jsonl, .* there twice: leave"
        ):
            append(corpus, again, shard_bytes=shard_bytes)
    shutil.copytree(corpus, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"--merge .*/c .*/copy: hold the same text, .*: leave one out"):
        merge([corpus, tmp_path / "copy"], tmp_path / "both")
    with pytest.raises(ValueError, match="hold the same text"):
        merge([corpus, corpus], tmp_path / "both")
    with (tmp_path / "old.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    append(corpus, Sources((str(tmp_path / "old.jsonl"),)))  # another file by now


def test_files_of_a_folder_that_are_there_are_not_put_there_again(tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    source(tmp_path / "dumps" / "may.jsonl", OLD)
    prepare(Request(Sources((str(tmp_path / "dumps"),)), "byte", tmp_path / "c", 0.1))
    june = source(tmp_path / "dumps" / "june.jsonl", NEW)
    with pytest.raises(ValueError, match=r"of 1 of 2 files already, such as .*may\.jsonl, .*: name the others alone"):
        append(tmp_path / "c", Sources((str(tmp_path / "dumps"),)))
    with pytest.raises(ValueError, match=r"of 1 of 1 files already"):  # the same by another spelling
        append(tmp_path / "c", Sources((str(tmp_path / "dumps" / ".." / "dumps" / "may.jsonl"),)))
    append(tmp_path / "c", june)
    assert len(read_manifest(tmp_path / "c").source_files) == 2
    prepare(Request(june, "byte", tmp_path / "d", 0.1))
    with pytest.raises(ValueError, match="1 of 1 files were read for both, and their text would be there twice"):
        merge([tmp_path / "c", tmp_path / "d"], tmp_path / "both")


def test_splits_of_one_dataset_are_no_text_twice(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, texts in (("train", OLD), ("test", NEW)):
        source(tmp_path / "data" / f"{split}.jsonl", texts)
    prepare(Request(Sources((f"hf:{tmp_path}/data",)), "byte", tmp_path / "c", 0.1))
    append(tmp_path / "c", Sources((f"hf:{tmp_path}/data::test",)))
    found = open_corpus(tmp_path / "c")
    assert sum(split.num_documents for split in found.splits.values()) == len(OLD) + len(NEW)


def test_a_text_is_the_same_whatever_field_is_read_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 50)
    prepare(Request(Sources((str(tmp_path / "a.txt"),)), "byte", tmp_path / "c", 0.1))
    with pytest.raises(ValueError, match="of 1 of 1 files already"):
        append(tmp_path / "c", Sources((str(tmp_path / "a.txt"),), Reading("body")))


def test_what_joins_a_merged_corpus_is_read_as_its_parts_were(tmp_path: Path) -> None:
    for name, key in (("a", "body"), ("b", "body"), ("c", "text")):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({key: f"{name} {number}"}) + "\n" for number in range(99))
        )
        prepare(Request(Sources((str(tmp_path / f"{name}.jsonl"),), Reading(key)), "byte", tmp_path / name, 0.1))
    (tmp_path / "new.jsonl").write_text(
        "".join(json.dumps({"body": f"new {n}", "text": "no"}) + "\n" for n in range(99))
    )
    new = Sources((str(tmp_path / "new.jsonl"),))
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "alike")
    append(tmp_path / "alike", new, reads_as_before=True)
    found = [text for split in ("train", "validation") for text in documents(open_corpus(tmp_path / "alike"), split)]
    assert sorted(text for text in found if text[0] == "n") == sorted(f"new {number}" for number in range(99))
    merge([tmp_path / "a", tmp_path / "c"], tmp_path / "apart")
    with pytest.raises(ValueError, match="were read in different ways; name one"):
        append(tmp_path / "apart", new, reads_as_before=True)


def test_what_is_appended_is_read_as_the_corpus_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, texts in (("old.jsonl", OLD), ("new.jsonl", NEW)):
        (tmp_path / name).write_text("".join(json.dumps({"body": text, "id": 7}) + "\n" for text in texts))
    there = Sources((str(tmp_path / "old.jsonl"),), Reading(template="{id}: {body}"))
    prepare(Request(there, "byte", tmp_path / "c", 0.1))
    command = ["prepare.py", "--append", str(tmp_path / "new.jsonl"), "--output", str(tmp_path / "c")]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    found = [text for split in ("train", "validation") for text in documents(open_corpus(tmp_path / "c"), split)]
    assert sorted(found) == sorted(f"7: {text}" for text in (*OLD, *NEW))


def of_another_end(corpus: Path, there: Path) -> Path:
    """Copy a corpus as if its tokenizer's settings had named another end of documents."""
    shutil.copytree(corpus, there)
    manifest = json.loads((there / "corpus.json").read_text())
    (there / "corpus.json").write_text(json.dumps({**manifest, "eos_token_id": 97}))
    config = json.loads((there / "tokenizer" / "tokenizer_config.json").read_text())
    (there / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "a"}))
    return there


def test_documents_of_one_corpus_end_alike(corpus: Path, tmp_path: Path) -> None:
    other = of_another_end(corpus, tmp_path / "d")
    with pytest.raises(ValueError, match=r"/c end with token 256, of .*/d with 97"):
        merge([corpus, other], tmp_path / "both")
    train, held_out = ([SourceConfig(path=str(path))] for path in (corpus, other))
    mixed = DataConfig(train=train, validation=held_out, sequence_length=8, global_batch_size=2, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"/c end with token 256, those of .*/d with 97.*prepare d again"):
        opened_splits(mixed)
    shutil.copy(other / "tokenizer" / "tokenizer_config.json", corpus / "tokenizer")
    assert "texts begin and end with ([], 97), corpus.json expects ([], 256)" in verify(corpus)[1][0]
    with pytest.raises(ValueError, match=r"texts begin and end with \(\[\], 97\), corpus.json expects \(\[\], 256\)"):
        append(corpus, source(tmp_path / "new.jsonl", NEW))


def test_settings_of_a_tokenizer_that_cannot_be_read_are_damage(corpus: Path) -> None:
    with (corpus / "tokenizer" / "tokenizer_config.json").open("a") as file:
        file.write("x")
    assert "tokenizer_config.json: cannot be read" in verify(corpus)[1][0]
