"""The held-out split: chosen by content, never empty, never everything."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.heldout import Document, HeldOut, Sample, choose, cut, place
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from tests.data.made import opened_splits

DOCUMENTS = [f"document {number} " + "text " * (number % 7) for number in range(500)]


def survey(documents: list[str], fraction: float, seed: int, at_once: int = 7) -> HeldOut:
    """Decide what is held out, from some documents at a time."""
    facts = [(place(text.encode(), seed), len(text.encode())) for text in documents]
    parts = (facts[first : first + at_once] for first in range(0, len(facts), at_once))
    return choose((np.array(part, np.uint64).T for part in parts), fraction)


def split(documents: Iterable[str], found: HeldOut, seed: int) -> Iterator[Document]:
    for text in documents:
        yield from found.split(text, len(text.encode()), place(text.encode(), seed))


def sample(documents: list[str], found: HeldOut, seed: int, wanted: int) -> list[str]:
    """Return what a tokenizer trains on, found by two processes."""
    together = Sample(wanted)
    for half in (0, 1):
        part = Sample(wanted, together.bound)
        for number in range(half, len(documents), 2):
            text = documents[number]
            part.add(place(text.encode(), seed), number, len(text.encode()), text)
        for entry in part.entries():
            together.add(*entry)
    return together.training_texts(found, lambda _: True)


def held_out(documents: list[str], fraction: float = 0.1, seed: int = 0) -> set[str]:
    found = survey(documents, fraction, seed)
    return {document.text for document in split(documents, found, seed) if document.held_out}


def test_the_split_follows_the_content_not_the_position() -> None:
    chosen = held_out(DOCUMENTS)
    assert 25 <= len(chosen) <= 80
    assert held_out(DOCUMENTS[::-1]) == chosen
    assert held_out(DOCUMENTS[:250]) == chosen & set(DOCUMENTS[:250])
    assert held_out(DOCUMENTS, seed=1) != chosen
    assert held_out(DOCUMENTS, fraction=0.2) > chosen


@given(documents=st.lists(st.text("ab", min_size=1), min_size=2, max_size=20), fraction=st.floats(1e-6, 1 - 1e-6))
def test_neither_split_is_ever_empty(documents: list[str], fraction: float) -> None:
    if len(set(documents)) == 1:
        with pytest.raises(ValueError, match="are the same, so none can be held out"):
            held_out(documents, fraction)
    else:
        parts = list(split(documents, survey(documents, fraction, 0), 0))
        assert "".join(part.text for part in parts) == "".join(documents)
        assert {part.held_out for part in parts} == {False, True}
        assert all(part.text for part in parts)


def test_the_tokenizer_never_trains_on_what_is_held_out() -> None:
    found = sample(DOCUMENTS, survey(DOCUMENTS, 0.1, 0), 0, 1 << 20)
    assert set(found) == set(DOCUMENTS) - held_out(DOCUMENTS)


def test_the_sample_is_bounded_and_does_not_depend_on_the_order() -> None:
    held = survey(DOCUMENTS, 0.1, 0)
    found = sample(DOCUMENTS, held, 0, 2000)
    assert 2000 <= sum(len(text.encode()) for text in found) < 2050
    assert sample(DOCUMENTS[::-1], held, 0, 2000) == found
    places = [place(text.encode(), 0) for text in found]
    assert places == sorted(places, reverse=True)


@given(text=st.text("a\n", min_size=2), fraction=st.floats(0.01, 0.99))
def test_a_single_document_is_cut_in_two(text: str, fraction: float) -> None:
    try:
        training, validation = cut(text, fraction)
    except ValueError:
        assert int(len(text) * (1 - fraction)) == 0
        return
    assert training + validation == text
    assert training
    assert validation


def test_a_book_is_cut_at_a_line_start() -> None:
    book = "".join(f"line {number}\n" for number in range(1000))
    found = survey([book], 0.02, 0)
    parts = list(split([book], found, 0))
    assert [part.held_out for part in parts] == [False, True]
    assert parts[0].text + parts[1].text == book
    assert parts[1].text.startswith("line ")
    assert 0.018 < parts[1].source_bytes / len(book) <= 0.02
    assert sample([book], found, 0, 10**6) == [parts[0].text]


def lines(number: int, count: int) -> str:
    return "".join(f"line {line} of document {number}\n" for line in range(count))


@pytest.mark.parametrize(
    "documents",
    [
        [lines(0, 1000), lines(1, 750)],
        [lines(number, 100) for number in range(20)],
        [lines(0, 20_000), *(lines(number, 4) for number in range(1, 2000))],
    ],
    ids=["two", "twenty", "one of them huge"],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_share_of_few_or_large_documents_is_kept(documents: list[str], seed: int) -> None:
    found = survey(documents, 0.02, seed)
    parts = list(split(documents, found, seed))
    held = sum(part.source_bytes for part in parts if part.held_out)
    assert 0.01 <= held / found.source_bytes <= 0.04
    assert "".join(part.text for part in parts) == "".join(documents)
    assert sorted(sample(documents, found, seed, 1 << 24)) == sorted(part.text for part in parts if not part.held_out)
    again = list(split(documents[::-1], survey(documents[::-1], 0.02, seed), seed))
    assert sorted(again) == sorted(parts), "the order of documents changes nothing"


def test_documents_of_a_large_corpus_stay_whole() -> None:
    documents = [lines(number, 1 + number % 9) for number in range(3000)]
    parts = list(split(documents, survey(documents, 0.02, 0), 0))
    expected = [text for text in documents if place(text.encode(), 0) < int(0.02 * 2**64)]
    assert [part.text for part in parts] == documents
    assert [part.text for part in parts if part.held_out] == expected


@given(
    documents=st.lists(st.text("aé🎉\n", min_size=1, max_size=400), min_size=2, max_size=4, unique=True),
    fraction=st.floats(0.01, 0.99),
)
def test_characters_are_never_cut(documents: list[str], fraction: float) -> None:
    parts = list(split(documents, survey(documents, fraction, 0), 0))
    assert "".join(part.text for part in parts) == "".join(documents)
    assert all(part.text for part in parts)


@pytest.mark.parametrize("documents", [["one"], ["same", "same"], DOCUMENTS], ids=["one", "same", "many"])
def test_everything_can_be_held_out(documents: list[str]) -> None:
    found = survey(documents, 1.0, 3)
    parts = list(split(documents, found, 3))
    assert [part.text for part in parts] == documents
    assert all(part.held_out for part in parts)
    assert sample(documents, found, 3, 10**6) == []


def test_text_that_another_source_trains_on_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same files, held out by one rule and trained on by another; one rule for both holds out the same."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    for name, fraction in (("part", 0.1), ("same", 0.1), ("whole", 1.0)):
        prepare(Request(Sources((str(tmp_path / "a.jsonl"),)), "byte", tmp_path / name, fraction))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "something else"}) + "\n")
    prepare(Request(Sources((str(tmp_path / "b.jsonl"),)), "byte", tmp_path / "other", 1.0))
    caplog.clear()
    for trained, scored, is_told in (
        (["part"], [], False),
        (["part"], ["whole"], True),
        (["part"], ["same"], False),
        (["part"], ["other"], False),
        (["part", "same"], [], False),
    ):
        train, validation = ([SourceConfig(path=str(tmp_path / name)) for name in names] for names in (trained, scored))
        opened_splits(
            DataConfig(train=train, validation=validation, sequence_length=8, global_batch_size=1, micro_batch_size=1)
        )
        assert ("hold out text by different rules: " in caplog.text) == is_told
        caplog.clear()
    prepare(Request(Sources((str(tmp_path / "a.jsonl"),)), "byte", tmp_path / "more", 0.3))
    sources = [SourceConfig(path=str(tmp_path / name)) for name in ("part", "more")]
    opened_splits(DataConfig(train=sources, sequence_length=8, global_batch_size=1, micro_batch_size=1))
    assert "/more were made of 1 of the same files, and hold out text by different rules: some that part" in caplog.text
