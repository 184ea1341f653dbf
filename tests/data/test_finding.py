"""Finding a text: every document that holds it, by any tokenizer, wherever blocks and pieces are cut."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.data import finding
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.finding import Found, find
from plumbline.data.indexed import IndexedWriter, token_dtype
from plumbline.data.packed import PackedSplit, open_packed
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.tasks.file import FileConfig
from plumbline.data.tasks.retrieval import RetrievalConfig
from plumbline.data.tasks.source import TaskSource
from plumbline.data.tokenizer_making import tokenizer_folder
from plumbline.data.tokenizers import Decoder

WORDS = ["alpha", "beta", " gamma", "\n", "é", "漢字", "🙂", " ", "needle", "nee", "dle", "<|endoftext|>"]
TOKENIZERS = ["byte", "train-bpe:400", "train-unigram:400"]

MakePair = Callable[..., Corpus]


@pytest.fixture(scope="module", params=TOKENIZERS)
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return 40 documents of up to 300 words, with a tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("finding")
    draw = random.Random(1)
    (folder / "text").mkdir()
    for number in range(40):
        words = draw.choices(WORDS, k=draw.randrange(1, 300))
        (folder / "text" / f"{number:02}.txt").write_text(f"document {number}:" + "".join(words), encoding="utf-8")
    prepare(Request(Sources((str(folder / "text"),)), request.param, folder / "corpus", workers=1))
    return open_corpus(folder / "corpus")


def documents(corpus: Corpus) -> list[tuple[int, int, str]]:
    """Return first and last token and text of each document, read one by one."""
    assert corpus.tokenizer_path is not None
    split, decoder = corpus.splits["train"], Decoder(corpus.tokenizer_path)
    begins = [0, *split.indexed.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
    return [(first, stop, decoder(split.indexed.read(first, stop).tolist())) for first, stop in pairwise(begins)]


def test_every_document_that_holds_a_text_is_found_once(corpus: Corpus) -> None:
    for text in ("needle", "eé", "漢", "\n gamma", "document 17:", "🙂needle", "字", "nobody wrote this", "a"):
        expected = [(first, stop) for first, stop, its in documents(corpus) if text in its]
        assert [(found.first, found.stop) for found in find(corpus, text, None)] == expected


@pytest.mark.parametrize("length", [16, 64, 512])
def test_packed_windows_that_hold_a_document_are_named(
    corpus: Corpus, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all windows, read and decoded one by one: a document begins with its number, so no window cuts that."""
    assert corpus.tokenizer_path is not None
    monkeypatch.setenv("PLUMBLINE_CACHE", str(tmp_path))
    packed, decoder = open_packed(corpus.splits["train"], corpus.fingerprint, length), Decoder(corpus.tokenizer_path)
    read = [decoder(packed.read(number, length).inputs.tolist()) for number in range(packed.training_windows(length))]
    for text in ("document 0:", "document 17:", "document 39:"):
        (found,) = find(corpus, text, length, packed.windows_with)
        assert found.text_windows == [window for window, its in enumerate(read) if text in its]
        assert {*found.text_windows} <= {*found.windows}
        held = [token for window in found.windows for token in pieces_of(packed, window, found)]
        inputs = [*range(found.first, found.stop)]
        assert sorted(held) in (inputs, inputs[:-1]), (
            "every input of the document, once; nothing follows the last one's end"
        )


def pieces_of(packed: PackedSplit, window: int, found: Found) -> list[int]:
    """Return the tokens of a document that a packed window holds as input."""
    its = slice(int(packed.windows[window]), int(packed.windows[window + 1]))
    spans = zip(packed.starts[its].tolist(), packed.lengths[its].tolist(), strict=True)
    return [token for start, size in spans for token in range(start, start + size) if found.first <= token < found.stop]


def test_pieces_and_blocks_may_be_cut_anywhere(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {text: list(find(corpus, text, 16)) for text in ("needle", "漢字", "🙂 gamma", "alphabeta")}
    for size in (17, 64, 301):
        monkeypatch.setattr(finding, "PIECE", size)
        monkeypatch.setattr(finding, "BLOCK", size)
        assert {text: list(find(corpus, text, 16)) for text in expected} == expected


def test_windows_are_those_whose_input_holds_the_text(corpus: Corpus) -> None:
    """By the characters of each window; a text that is cut between two windows is in both."""
    assert corpus.tokenizer_path is not None
    split, decoder, length = corpus.splits["train"], Decoder(corpus.tokenizer_path), 64

    def read(windows: Sequence[int]) -> str:
        return decoder([int(token) for window in windows for token in split.read(window, length).inputs])

    checked = 0
    for number in range(40):
        text = f"document {number}:"
        for found in find(corpus, text, length):
            last = split.training_windows(length)
            assert found.windows == range(found.first // length, min((found.stop - 1) // length + 1, last))
            if found.stop <= last * length:
                assert text in read(found.text_windows)
                assert text not in read(found.text_windows[1:])
                assert text not in read(found.text_windows[:-1])
                checked += 1
    assert checked > 30


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_all_windows_of_a_document_that_hold_the_text_are_named(
    corpus: Corpus, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the windows of every place of the text, one token after the other."""
    assert corpus.tokenizer_path is not None
    monkeypatch.setenv("PLUMBLINE_CACHE", str(tmp_path))
    split, decoder, length = corpus.splits["train"], Decoder(corpus.tokenizer_path), 32
    packed = open_packed(split, corpus.fingerprint, length) if packing == "best_fit" else None
    holding = packed.windows_with if packed else finding._end_to_end(split, length)
    most = 0
    for text in ("needle", "m", "🙂"):
        for found in find(corpus, text, length, packed.windows_with if packed else None):
            windows: set[int] = set()
            start = found.first
            while place := finding.next_occurrence(split, text, decoder, start, found.stop):
                windows.update(holding(*place))
                start = place[0] + 1
            assert found.text_windows == sorted(windows)
            most = max(most, len(windows))
    assert most > 5


def test_a_document_is_searched_for_so_many_places_and_it_is_said_that_there_may_be_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (b"x" * 99 + b"needle") * 9 + b"x" * 99
    with IndexedWriter(tmp_path / "pair", token_dtype(257)) as writer:
        writer.add_documents(np.frombuffer(text, np.uint8), [len(text)])
    corpus = replace(open_corpus(tmp_path / "pair"), tokenizer_path=tokenizer_folder("byte"))
    (found,) = find(corpus, "needle", 15)
    assert found.text_windows == [place // 15 for place in range(99, 945, 105)]
    assert not found.more
    for places, more in ((9, False), (8, True)):
        monkeypatch.setattr(finding, "PLACES", places)
        (found,) = find(corpus, "needle", 15)
        assert (len(found.text_windows), found.more) == (places, more)


def test_the_last_tokens_fill_no_window(corpus: Corpus) -> None:
    first, _, text = documents(corpus)[-1]
    length = first - 1  # one window before the last document
    (found,) = find(corpus, text[: text.index(":") + 1], length)
    assert found.first == first
    assert found.windows in (range(0), range(1, corpus.splits["train"].training_windows(length)))


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12), place=st.floats(0, 1, exclude_max=True))
def test_the_document_around_a_token(make_pair: MakePair, lengths: list[int], place: float) -> None:
    split = make_pair(lengths, name="around").splits["train"]
    token = int(place * split.num_tokens)
    ends = np.cumsum(lengths)
    number = int(np.searchsorted(ends, token, side="right"))
    assert finding.document_around(split, token) == (int(ends[number]) - lengths[number], int(ends[number]))


def test_a_tokenizer_of_bytes_is_known_by_its_vocabulary(tmp_path: Path) -> None:
    assert Decoder(tokenizer_folder("byte")).is_bytes
    (tmp_path / "text.txt").write_text("some more text, some more, some more\n" * 50)
    prepare(Request(Sources((str(tmp_path / "text.txt"),)), "train-bpe:270", tmp_path / "bpe", workers=1))
    assert not Decoder(tmp_path / "bpe" / "tokenizer").is_bytes


def test_examples_are_found_by_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"prompt": "one", "answer": "two"}\n{"prompt": "two", "answer": "three"}\n')
    source = TaskSource(FileConfig(path=str(path)))
    assert [found.first for found in find(source, "two", 99)] == [0, 1]
    assert list(find(source, "three", 99)) == [Found(1, 2, range(1, 2), range(1, 2))]
    assert not list(find(source, "four", 99))


def test_what_is_no_text_is_refused(make_pair: MakePair) -> None:
    pair = make_pair([30])
    with pytest.raises(ValueError, match=r"--find 'x': .*tokens has no tokenizer, so no text can be found in it"):
        find(pair, "x", None)
    with pytest.raises(ValueError, match="--find 'x': task retrieval has no tokenizer"):
        find(TaskSource(RetrievalConfig()), "x", None)
    with pytest.raises(ValueError, match="--find: an empty text is everywhere"):
        find(pair, "", None)
