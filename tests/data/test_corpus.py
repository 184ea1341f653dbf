"""Opening a corpus: what is missing, truncated or damaged is named, with what to do about it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from plumbline.data.config import SourceConfig
from plumbline.data.corpus import Corpus, open_corpus, read_manifest
from plumbline.data.preparation.growing import append
from plumbline.data.preparation.verifying import verify
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.sources import Sources


@pytest.fixture
def corpus(byte_corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(byte_corpus, tmp_path / "copy"))


def test_a_corpus_says_what_it_is(byte_corpus: Path) -> None:
    corpus = open_corpus(str(byte_corpus))
    assert (corpus.name, corpus.vocab_size, corpus.eos_token_id) == ("bytes", 257, 256)
    assert corpus.tokenizer_path == byte_corpus / "tokenizer"
    assert set(corpus.splits) == {"train", "validation"}
    for split in corpus.splits.values():
        assert split.source_bytes == split.num_tokens - split.num_documents
    assert sum(split.num_documents for split in corpus.splits.values()) == 60
    assert verify(byte_corpus)[1] == []


def test_fingerprint_follows_the_tokens_not_the_folder(corpus: Path, byte_corpus: Path) -> None:
    assert open_corpus(corpus).fingerprint == open_corpus(byte_corpus).fingerprint
    manifest = json.loads((corpus / "corpus.json").read_text())
    manifest["files"]["train.bin"]["xxh3_64"] = "0" * 16
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    assert open_corpus(corpus).fingerprint != open_corpus(byte_corpus).fingerprint


def test_a_corpus_is_named_by_the_last_part_of_its_path(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "current").symlink_to(corpus)
    assert open_corpus(tmp_path / "current").name == open_corpus(f"{tmp_path}/current/").name == "current"
    monkeypatch.chdir(corpus)
    assert open_corpus(".").name == open_corpus("./tokenizer/..").name == corpus.name
    assert [SourceConfig(path=path).label for path in (".", "s3://b/c/", "c")] == [corpus.name, "c", "c"]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_bare_pair_opens(byte_corpus: Path, suffix: str) -> None:
    bare = open_corpus(f"{byte_corpus}/train{suffix}")
    whole = open_corpus(byte_corpus)
    assert bare.splits["train"].num_tokens == whole.splits["train"].num_tokens
    assert (bare.name, bare.vocab_size, bare.splits["train"].source_bytes) == ("train", None, None)
    assert bare.fingerprint != open_corpus(f"{byte_corpus}/validation").fingerprint


def test_a_pair_with_dots_in_its_name_opens(make_pair: Callable[..., Corpus]) -> None:
    assert make_pair([3], "web.v1.5").name == "web.v1.5"


def test_a_missing_corpus_lists_its_neighbours(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"typo: no corpus here .*copy\. Make one with: python launcher/prepare\.py"):
        open_corpus(corpus.parent / "typo")


def test_a_text_in_the_place_of_a_corpus_is_what_to_make_it_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never what the command would write to."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").touch()
    Path("corpora/web").mkdir(parents=True)
    made = "--tokenizer train-bpe:8192 --output corpora"
    with pytest.raises(ValueError, match=rf"--source book\.txt {made}/book$"):
        open_corpus("book.txt")
    with pytest.raises(ValueError, match=rf"--source corpora/web {made}/web-tokens$"):
        open_corpus("corpora/web")
    Path("corpora/half.bin").touch()
    for name, output in (("code", "code"), ("half.bin", "half")):
        with pytest.raises(ValueError, match=rf"--source PATH {made}/{output}$"):
            open_corpus(f"corpora/{name}")


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin", "validation.idx"])
def test_truncation_is_found_when_opening(corpus: Path, name: str) -> None:
    data = (corpus / name).read_bytes()
    (corpus / name).write_bytes(data[:-2])
    with pytest.raises(ValueError, match=rf"{name}: has {len(data) - 2} bytes, corpus.json expects {len(data)} bytes"):
        open_corpus(corpus)
    (corpus / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: is missing, corpus.json expects"):
        open_corpus(corpus)


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin", "validation.idx"])
def test_one_flipped_bit_is_found_when_verifying(corpus: Path, name: str) -> None:
    data = bytearray((corpus / name).read_bytes())
    data[len(data) // 2] ^= 1
    (corpus / name).write_bytes(data)
    (damage,) = verify(corpus)[1]
    assert damage.startswith(f"{name}: checksum ")


def change_manifest(corpus: Path, path: tuple[str, ...], value: object) -> None:
    """Write another value of corpus.json."""
    manifest = json.loads((corpus / "corpus.json").read_text())
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (corpus / "corpus.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("splits", "train", "tokens"), 5, r"train\.idx: \d+ tokens, corpus\.json expects 5"),
        (("splits", "validation", "documents"), 5, r"validation\.idx: \d+ documents, corpus\.json expects 5"),
        (("vocab_size",), "many", r"corpus\.json: vocab_size: .*valid integer"),
        (("format_version",), 3, r"corpus\.json: format_version: "),
    ],
)
def test_a_manifest_that_disagrees_is_refused(corpus: Path, path: tuple[str, ...], value: object, message: str) -> None:
    change_manifest(corpus, path, value)
    with pytest.raises(ValueError, match=message):
        open_corpus(corpus)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("files", "train.bin", "xxh3_64"), "../../notes", r"files\.train\.bin\.xxh3_64: String should match pattern"),
        (("files", "train.bin", "blocks"), ["/notes"], r"files\.train\.bin\.blocks\.0: String should match pattern"),
        (("tokenizer", "sha256"), "../notes", r"tokenizer\.sha256: String should match pattern"),
        (("splits", "train", "shards"), ["a/../../b"], "a/../../b: names a file outside of the corpus"),
        (("files", "/notes"), {"size": 1, "xxh3_64": "0" * 16}, "/notes: names a file outside of the corpus"),
    ],
)
def test_a_manifest_that_names_files_elsewhere_is_refused(
    corpus: Path, tmp_path: Path, path: tuple[str, ...], value: object, message: str
) -> None:
    change_manifest(corpus, path, value)
    with pytest.raises(ValueError, match=message):
        open_corpus(f"file://{corpus}", CacheConfig(path=str(tmp_path / "cache")))
    with pytest.raises(ValueError, match=message):
        append(corpus, Sources((str(corpus / "corpus.json"),)))


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda _: "[" * 100_000 + "]" * 100_000])
def test_a_half_written_manifest_is_refused(corpus: Path, damage: Callable[[str], str]) -> None:
    (corpus / "corpus.json").write_text(damage((corpus / "corpus.json").read_text()))
    for parse in (open_corpus, read_manifest):
        with pytest.raises(ValueError, match=r"corpus\.json: the file: Invalid JSON.*; prepare the corpus again"):
            parse(corpus)


def test_another_tokenizer_in_its_place_is_noticed(corpus: Path) -> None:
    file = corpus / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not the tokenizer that made the tokens"):
        open_corpus(corpus)
    file.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing"):
        open_corpus(corpus)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("splits", {}, "splits = none: neither train nor validation is there"),
        ("vocab_size", 256, "eos_token_id = 256 is beyond vocab_size = 256"),
        ("vocab_size", 0, "vocab_size: Input should be greater than or equal to 1"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(corpus: Path, key: str, value: object, words: str) -> None:
    manifest = json.loads((corpus / "corpus.json").read_text())
    (corpus / "corpus.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(ValueError, match=words):
        open_corpus(corpus)


def test_verifying_finds_a_manifest_that_contradicts_its_files(corpus: Path) -> None:
    manifest = json.loads((corpus / "corpus.json").read_text())
    manifest["splits"]["train"]["tokens"] += 1
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"corpus\.json expects"):
        verify(corpus)
