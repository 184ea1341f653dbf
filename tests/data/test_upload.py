"""A corpus at a URL: there when all of it is, gone on with after an error, never in the place of something else."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from plumbline.data.corpus import open_corpus
from plumbline.data.preparation.growing import append
from plumbline.data.preparation.upload import prepare_at
from plumbline.data.preparation.verifying import verify
from plumbline.data.prepare import Request, prepare
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.sources import Sources
from tests.data.test_prepare import files

NUMBERS = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory://uploads{next(NUMBERS)}/corpora/c"


@pytest.fixture
def request_of_it(text_folder: Path) -> Request:
    return Request(Sources((str(text_folder),)), "byte", Path(), 0.2)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is sent, in order."""
    names: list[str] = []
    memory = fsspec.filesystem("memory")
    original = type(memory).put_file

    def put_file(self: Any, here: str, there: str, **options: Any) -> None:
        names.append(there.rpartition("/c/")[2])
        if names.count("fail") and there.endswith(".idx"):
            raise RuntimeError("the wire is cut")
        original(self, here, there, **options)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    return names


def at(url: str) -> dict[str, bytes]:
    memory = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    return {str(path).removeprefix(f"{root}/"): memory.cat_file(path) for path in memory.find(root)}


def test_a_corpus_is_sent_with_its_manifest_last(
    url: str, request_of_it: Request, sent: list[str], text_folder: Path, tmp_path: Path
) -> None:
    result = prepare_at(url, request_of_it, tmp_path / "staging")
    assert result.output == url
    prepare(Request(Sources((str(text_folder),)), "byte", tmp_path / "c", 0.2))
    assert at(url) == files(tmp_path / "c")
    assert sent[-1] == "corpus.json"
    assert list((tmp_path / "staging").iterdir()) == []
    assert verify(url)[1] == []
    assert open_corpus(url).fingerprint == open_corpus(tmp_path / "c").fingerprint
    assert prepare_at(url, request_of_it, tmp_path / "staging").seconds is None
    with pytest.raises(ValueError, match=r"holds another corpus .*--overwrite"):
        prepare_at(url, Request(Sources((str(text_folder),)), "byte", Path(), 0.1), tmp_path / "staging")


def test_a_corpus_is_sent_to_a_folder_of_this_machine(request_of_it: Request, tmp_path: Path) -> None:
    prepare_at(f"file://{tmp_path}/new/c", request_of_it, tmp_path / "staging")
    assert verify(tmp_path / "new" / "c")[1] == []
    assert open_corpus(f"file://{tmp_path}/new/c").fingerprint == open_corpus(tmp_path / "new" / "c").fingerprint


def test_an_upload_that_fails_is_gone_on_with(
    url: str, request_of_it: Request, sent: list[str], tmp_path: Path
) -> None:
    sent.append("fail")
    with pytest.raises(
        OSError, match=r"\.idx could not be written \(RuntimeError: the wire is cut\); the same command"
    ):
        prepare_at(url, request_of_it, tmp_path)
    assert "corpus.json" not in at(url)
    done = {name for name in at(url) if not name.endswith(".idx")}
    sent.clear()
    prepare_at(url, request_of_it, tmp_path)
    assert not done & set(sent)
    assert verify(url)[1] == []


def test_a_corpus_is_replaced_and_nothing_else(
    url: str, request_of_it: Request, text_folder: Path, tmp_path: Path
) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{url}/thesis.txt", b"the only copy")
    with pytest.raises(ValueError, match=r"exists and is not a corpus \(no corpus\.json\)"):
        prepare_at(url, request_of_it, tmp_path)
    memory.rm_file(f"{url}/thesis.txt")
    prepare_at(url, request_of_it, tmp_path)
    memory.pipe_file(f"{url}/thesis.txt", b"the only copy")
    sharded = Request(Sources((str(text_folder),)), "byte", Path(), 0.2, overwrite=True, shard_bytes=1000)
    prepare_at(url, sharded, tmp_path)
    assert "train.bin" not in at(url)
    assert at(url)["thesis.txt"] == b"the only copy"
    assert verify(url)[1] == []


def broken_off(url: str, request: Request, sent: list[str], staging: Path) -> None:
    sent.append("fail")
    with pytest.raises(OSError, match="the wire is cut"):
        prepare_at(url, request, staging)
    sent.clear()


def test_a_corpus_can_be_read_until_the_one_in_its_place_is_whole(
    url: str, request_of_it: Request, sent: list[str], tmp_path: Path
) -> None:
    prepare_at(url, request_of_it, tmp_path / "staging")
    before, cache = at(url), CacheConfig(path=str(tmp_path / "cache"))
    sharded = replace(request_of_it, overwrite=True, shard_bytes=1000)
    broken_off(url, sharded, sent, tmp_path / "staging")
    assert before.items() <= at(url).items()
    assert verify(url)[1] == []
    done = set(at(url)) - set(before)
    assert done
    prepare_at(url, sharded, tmp_path / "staging")
    assert not done & set(sent)  # nothing is sent twice
    assert sent[-1] == "corpus.json"
    prepare(replace(sharded, output=tmp_path / "c"))
    (generation,) = {name.partition("/")[0] for name in at(url)} - {"corpus.json"}
    assert {name.removeprefix(f"{generation}/") for name in at(url)} == set(files(tmp_path / "c"))
    assert verify(url)[1] == []
    there, here = open_corpus(url, cache), open_corpus(tmp_path / "c")
    assert (there.fingerprint, there.name, str(there)) == (here.fingerprint, "c", url)
    assert there.splits["train"].read(3, 64).inputs.tolist() == here.splits["train"].read(3, 64).inputs.tolist()
    assert list((tmp_path / "staging").iterdir()) == []
    third = replace(request_of_it, overwrite=True, seed=3)
    prepare_at(url, third, tmp_path / "staging")
    assert not any(name.startswith(generation) for name in at(url))
    assert verify(url)[1] == []
    broken_off(url, sharded, sent, tmp_path / "staging")
    assert prepare_at(url, replace(third, overwrite=False), tmp_path / "staging").seconds is None  # it stays after all
    assert not any(name.startswith(generation) for name in at(url))
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_was_replaced_is_removed_by_the_next_command(
    url: str, request_of_it: Request, sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    prepare_at(url, request_of_it, tmp_path)
    second = replace(request_of_it, overwrite=True, seed=3)

    def cut(*_: object) -> None:
        raise RuntimeError("the wire is cut")

    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "rm_file", cut)
        with pytest.raises(OSError, match="the wire is cut"):
            prepare_at(url, second, tmp_path)
    assert "train.bin" in at(url)
    sent.clear()
    prepare_at(url, replace(second, overwrite=overwrite), tmp_path)
    assert set(sent) <= {"corpus.json"}
    assert len({name.partition("/")[0] for name in at(url)}) == 2
    assert verify(url)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_what_replaced_another_grows(url: str, request_of_it: Request, tmp_path: Path) -> None:
    prepare_at(url, request_of_it, tmp_path / "staging")
    prepare_at(url, replace(request_of_it, overwrite=True, seed=3), tmp_path / "staging")
    for name, data in at(url).items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    copied = open_corpus(tmp_path / "copy")
    assert copied.fingerprint == open_corpus(url).fingerprint
    (tmp_path / "new.txt").write_text("one more document")
    append(tmp_path / "copy", Sources((str(tmp_path / "new.txt"),)))
    assert verify(tmp_path / "copy")[1] == []
    grown = open_corpus(tmp_path / "copy")
    assert sum(split.num_documents for split in grown.splits.values()) == 61
    assert not list((tmp_path / "copy").glob("generation-*"))


def test_s3(s3: Any, request_of_it: Request, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"--output s3://nowhere/c: .* could not be written"):
        prepare_at("s3://nowhere/c", request_of_it, tmp_path)
    s3.mkdir("uploads")
    url = "s3://uploads/corpora/c"
    prepare_at(url, replace(request_of_it, shard_bytes=10_000), tmp_path)
    assert verify(url)[1] == []
    assert prepare_at(url, replace(request_of_it, shard_bytes=10_000), tmp_path).seconds is None
    prepare_at(url, replace(request_of_it, overwrite=True), tmp_path)
    assert verify(url)[1] == []
    assert open_corpus(url, CacheConfig(path=str(tmp_path / "cache"))).splits["train"].num_tokens > 0
