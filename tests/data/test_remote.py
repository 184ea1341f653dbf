"""Corpora at a URL: the same batches as from a local copy, or an error that names URL and shard.

The servers are real: HTTP by servers.py, S3 by moto, both on the loopback device.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import NoCredentialsError, PartialCredentialsError  # type: ignore[import-untyped]

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.indexed import BLOCK_BYTES, IndexedWriter, token_dtype
from plumbline.data.inputs.reading import Reading
from plumbline.data.loader import TrainBatches
from plumbline.data.opening import open_source
from plumbline.data.preparation.verifying import verify
from plumbline.data.prepare import Request, prepare
from plumbline.data.remote import ahead, fetch
from plumbline.data.remote.ahead import Ahead
from plumbline.data.remote.cache import Cache, CacheConfig
from plumbline.data.remote.fetch import RemoteError
from plumbline.data.sources import Sources
from tests.conftest import PATIENCE
from tests.data.made import shard
from tests.data.servers import Server, serve


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(fetch, "LONGEST_WAIT", 0.01)


@pytest.fixture(scope="session")
def blocky(byte_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a corpus of two shards of 10.5 and 18 MB, of two and three blocks, the pairs bare as well."""
    folder, source = tmp_path_factory.mktemp("blocky"), tmp_path_factory.mktemp("text") / "text.txt"
    draw = np.random.default_rng(0)
    source.write_bytes(draw.integers(97, 123, 14_700_000, np.uint8).tobytes()[: 14_700_000 // 7350 * 7350])
    text = source.read_bytes().decode()
    source.write_text("#".join(text[start : start + 7350] for start in range(0, len(text), 7350)))
    sources = Sources((str(source),), Reading(document_separator="#"))
    prepare(Request(sources, "byte", folder / "whole", validation_fraction=0.03))
    documents = open_corpus(folder / "whole").splits["train"].num_documents
    return shard(folder / "whole", folder / "blocky", [documents * 3 // 8])


def config(path: object, cache: Path, batch: int = 8, max_bytes: int = 10**9) -> DataConfig:
    return DataConfig.model_validate(
        {
            "train": [{"path": path}],
            "sequence_length": 64,
            "global_batch_size": batch,
            "micro_batch_size": batch,
            "cache": {"path": str(cache), "max_bytes": max_bytes},
        }
    )


def read(data: DataConfig, start: int = 0, stop: int = 40) -> list[list[list[int]]]:
    """Return tokens, samples and document numbers of some steps, read ahead as a run does."""
    names = ("input_ids", "labels", "sample_index", "document_ids", "positions")
    batches = TrainBatches(data, seed=3)
    with contextlib.closing(batches.iterate(start, stop)) as steps:
        return [[batch[name].tolist() for batch in step for name in names] for step in steps]  # type: ignore[literal-required]


def test_http_gives_the_batches_of_a_local_copy(sharded: Path, server: Server, tmp_path: Path) -> None:
    local, remote = config(str(sharded), tmp_path), config(f"{server.url}/sharded", tmp_path / "cache")
    here, there = TrainBatches(local, 0).corpora["sharded"], TrainBatches(remote, 0).corpora["sharded"]
    assert there.fingerprint == here.fingerprint
    assert (there.name, there.vocab_size, str(there)) == ("sharded", 257, f"{server.url}/sharded")
    assert there.tokenizer_path is not None
    assert here.tokenizer_path is not None
    for file in here.tokenizer_path.iterdir():
        assert (there.tokenizer_path / file.name).read_bytes() == file.read_bytes()
    assert read(remote) == read(local)
    assert read(remote, 13, 20) == read(local)[13:20]  # resumed in the middle
    assert set(server.count(".bin").values()) == set(server.count(".idx").values()) == {1}
    assert verify(f"{server.url}/sharded")[1] == []
    assert read_manifest(f"{server.url}/sharded", remote.cache) == read_manifest(sharded)


def test_nothing_is_fetched_before_it_is_read(sharded: Path, server: Server, tmp_path: Path) -> None:
    corpus = open_corpus(f"{server.url}/sharded", CacheConfig(path=str(tmp_path)))
    assert not server.count(".bin")
    assert not server.count(".idx")
    corpus.splits["train"].read(0, 64)
    assert {path for path, _ in server.asked if "train" in path} == {
        "/sharded/train-00000.bin",
        "/sharded/train-00000.idx",
    }


def test_without_a_folder_the_users_cache_is_taken(
    sharded: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    held_out = open_source(SourceConfig(path=f"{server.url}/sharded")).held_out  # as eval.py --data opens it
    expected = open_corpus(sharded).held_out
    np.testing.assert_array_equal(held_out.read(3, 64).labels, expected.read(3, 64).labels)
    assert held_out.bits_per_byte(1.0) == expected.bits_per_byte(1.0)
    assert {path.name for path in (tmp_path / "plumbline" / "corpora").iterdir()} == {
        "held", "lock", "pieces", "tokenizers", "tokenizers.lock",
    }  # fmt: skip


def test_a_tokenizer_that_a_killed_process_left_in_part_is_fetched_again(server: Server, tmp_path: Path) -> None:
    cache = CacheConfig(path=str(tmp_path))
    whole = open_corpus(f"{server.url}/sharded", cache).tokenizer_path
    assert whole is not None
    names = {path.name for path in whole.iterdir()}
    partial = whole.rename(whole.with_name(f"{whole.name}.partial"))
    (partial / "tokenizer.json").write_text("{")
    again = open_corpus(f"{server.url}/sharded", cache).tokenizer_path
    assert again == whole
    assert {path.name for path in again.iterdir()} == names
    assert (again / "tokenizer.json").stat().st_size > 1


def test_two_addresses_of_one_corpus_share(sharded: Path, server: Server, tmp_path: Path) -> None:
    with serve(sharded) as second:
        read(config(f"{server.url}/sharded", tmp_path))
        read(config(second.url + "/", tmp_path))
        assert not second.count(".bin")
        assert not second.count(".idx")


@pytest.mark.parametrize("way", ["prefix", "list", "folder", "glob"])
def test_bare_pairs_at_a_url(sharded: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "web").mkdir()
    for number in range(2):
        for ending in ("bin", "idx"):
            data = (sharded / f"train-0000{number}.{ending}").read_bytes()
            (tmp_path / "web" / f"p{number}.{ending}").write_bytes(data)
    with serve(tmp_path) as running:
        base, local = f"{running.url}/web", str(tmp_path / "web" / "p0") if way == "prefix" else str(tmp_path / "web")
        remote: dict[str, str | list[str]] = {
            "prefix": f"{base}/p0",
            "list": [f"{base}/p1", f"{base}/p0.idx"],
            "folder": base,
            "glob": f"{base}/p*",
        }
        assert read(config(remote[way], tmp_path / "cache")) == read(config(local, tmp_path))
        with pytest.raises(ValueError, match=r"typo\*?: no \.idx file here"):
            open_corpus(
                {**remote, "prefix": [f"{base}/p0", f"{base}/typo"]}[way] if way == "prefix" else f"{base}/typo*"
            )


def test_a_bare_pair_that_is_replaced_while_it_is_read_is_an_error(blocky: Path, tmp_path: Path) -> None:
    """And no part of the new one is kept as if it were of the first."""
    for ending in ("bin", "idx"):
        (tmp_path / f"p.{ending}").write_bytes((blocky / f"train-00001.{ending}").read_bytes())
    stored, cache = tmp_path / "p.bin", CacheConfig(path=str(tmp_path / "cache"))
    first, times = stored.read_bytes(), (stored.stat().st_atime_ns, stored.stat().st_mtime_ns)
    last = len(first) // 2 // 64 - 2
    with serve(tmp_path) as running:
        split = open_corpus(f"{running.url}/p", cache).splits["train"]
        before = split.read(0, 64).inputs.tolist()
        stored.write_bytes(bytes(len(first)))
        with pytest.raises(RemoteError, match=r"p\.bin \(bytes .*the file was replaced or removed there"):
            split.read(last, 64)
        assert split.read(0, 64).inputs.tolist() == before
        stored.unlink()
        with pytest.raises(RemoteError, match=r"p\.bin"):
            split.read(last, 64)
        stored.write_bytes(first)
        os.utime(stored, ns=times)
        expected = open_corpus(tmp_path / "p").splits["train"].read(last, 64)
        np.testing.assert_array_equal(split.read(last, 64).inputs, expected.inputs)


def test_memory(sharded: Path, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(sharded.resolve()), "/corpora/sharded", recursive=True)
    assert read(config("memory://corpora/sharded", tmp_path / "cache")) == read(config(str(sharded), tmp_path))


@pytest.fixture
def bucket(sharded: Path, blocky: Path, s3: Any) -> str:
    """Put corpora into a bucket."""
    if not s3.exists("bucket"):  # moto keeps one account for all of its servers
        s3.mkdir("bucket")
    for corpus in (sharded, blocky):
        for path in sorted(corpus.rglob("*")):
            if path.is_file():
                s3.pipe(f"bucket/{corpus.name}/{path.relative_to(corpus)}", path.read_bytes())
    return "s3://bucket"


def test_s3(bucket: str, sharded: Path, blocky: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(config(f"{bucket}/sharded", tmp_path / "cache")) == read(config(str(sharded), tmp_path))
    assert read(config(f"{bucket}/blocky", tmp_path / "cache"), 0, 6) == read(config(str(blocky), tmp_path), 0, 6)
    pairs = config(f"{bucket}/sharded/train-*", tmp_path / "cache")
    assert read(pairs) == read(config(str(sharded / "train-*"), tmp_path))
    with pytest.raises(ValueError, match=r"s3://bucket/typo: no \.idx file here"):
        open_corpus(f"{bucket}/typo", CacheConfig(path=str(tmp_path / "cache")))
    assert "very-secret" not in caplog.text


def test_s3_that_lost_a_shard(bucket: str, s3: Any, tmp_path: Path) -> None:
    s3.rm("bucket/sharded/train-00001.bin")
    with pytest.raises(RemoteError, match=r"s3://bucket/sharded/train-00001\.bin: no such file"):
        read(config(f"{bucket}/sharded", tmp_path))


TROUBLES = ["slow", "breaks-off", "cuts-short", "lies", "503", "429", "silent"]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_that_passes_changes_nothing(
    trouble: str, sharded: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trouble == "silent":
        monkeypatch.setattr(fetch, "READ_SECONDS", 0.3)
    server.behaviour = lambda path, before: trouble if before < 2 and "train" in path else "well"
    assert read(config(f"{server.url}/sharded", tmp_path / "cache")) == read(config(str(sharded), tmp_path))
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("trouble", [*TROUBLES[1:], "404", "403"])
def test_trouble_that_stays_ends_with_an_error_that_names_the_shard(
    trouble: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "READ_SECONDS", 0.2)
    server.behaviour = lambda path, _: trouble if path.endswith("train-00001.bin") else "well"
    expected = {"lies": "wrong bytes, the last with checksum", "404": "no such file", "403": "could not be read"}
    why = expected.get(trouble, "could not be read in 8 tries")
    with pytest.raises(RemoteError, match=rf"{server.url}/sharded/train-00001\.bin.*{why}"):
        read(config(f"{server.url}/sharded", tmp_path))
    asked = sum(server.count("train-00001.bin").values())
    assert asked <= 3 * fetch.TRIES + ahead.THREADS
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(("trouble", "error"), [("500", OSError), ("lies", ValueError), ("cuts-short", OSError)])
def test_a_manifest_that_does_not_arrive_is_named(
    trouble: str, error: type[Exception], server: Server, tmp_path: Path
) -> None:
    server.behaviour = lambda path, _: trouble if path.endswith("corpus.json") else "well"
    with pytest.raises(error, match=rf"{server.url}/sharded/corpus\.json: "):
        open_corpus(f"{server.url}/sharded", CacheConfig(path=str(tmp_path)))
    server.behaviour = lambda *_: "well"
    open_corpus(f"{server.url}/sharded", CacheConfig(path=str(tmp_path)))


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        RemoteError, match=r"http://127\.0\.0\.1:9/x/corpus\.json: its size could not be read in 8 tries"
    ):
        open_corpus("http://127.0.0.1:9/x", CacheConfig(path=str(tmp_path)))


def test_blocks_are_fetched_and_checked_alone(blocky: Path, tmp_path: Path) -> None:
    with serve(blocky.parent) as running:
        remote, local = config(f"{running.url}/blocky", tmp_path / "cache"), config(str(blocky), tmp_path)
        split = open_corpus(f"{running.url}/blocky", remote.cache).splits["train"]
        window = split.num_tokens // 64 - 2
        expected = open_corpus(blocky).splits["train"]
        np.testing.assert_array_equal(split.read(window, 64).inputs, expected.read(window, 64).inputs)
        ((_, part),) = running.count("train-00001.bin")
        assert part is not None
        assert part.startswith(f"bytes={2 * BLOCK_BYTES}-")
        across = BLOCK_BYTES // 2 // 100  # a window of two blocks
        np.testing.assert_array_equal(split.read(across, 100).inputs, expected.read(across, 100).inputs)
        assert read(remote, 0, 10) == read(local, 0, 10)
        assert set(running.count(".bin").values()) == {1}
        running.behaviour = lambda path, _: "ignores ranges" if path.endswith(".bin") else "well"
        with pytest.raises(RemoteError, match=r"train-0000\d\.bin: the server sends all [\d,]+ bytes where"):
            read(config(f"{running.url}/blocky", tmp_path / "other"), 0, 10)
        running.behaviour = lambda path, _: "lies" if path.endswith(".bin") else "well"
        with pytest.raises(RemoteError, match=r"train-0000\d\.bin \(bytes .*wrong bytes"):
            read(config(f"{running.url}/blocky", tmp_path / "third"), 0, 10)


def test_without_checksums_of_blocks_a_shard_is_fetched_and_checked_whole(blocky: Path, tmp_path: Path) -> None:
    whole = blocky.parent / "whole"
    shard(whole, tmp_path / "served", [1000], blocks=False)
    with serve(tmp_path) as running:
        assert read(config(f"{running.url}/served", tmp_path / "c"), 0, 4) == read(
            config(str(tmp_path / "served"), tmp_path), 0, 4
        )
        size = (tmp_path / "served" / "train-00000.bin").stat().st_size
        assert len(running.count("train-00000.bin")) == -(-size // BLOCK_BYTES)
        assert (tmp_path / "c" / "pieces").is_dir()
        sizes = {path.stat().st_size for path in (tmp_path / "c" / "pieces").iterdir()}
        assert size in sizes


def test_the_folder_never_exceeds_its_limit(blocky: Path, tmp_path: Path) -> None:
    limit = 3 * BLOCK_BYTES  # of five blocks, indices and tokenizer
    largest, over = 0, threading.Event()
    cache = Cache(CacheConfig(path=str(tmp_path / "c")))

    def watch() -> None:
        nonlocal largest
        while not over.wait(0.001):
            with contextlib.suppress(FileNotFoundError), cache.locked():  # else one that went and one that came count
                pieces = (tmp_path / "c" / "pieces").iterdir()  # a plan may be written beside them at any time
                largest = max(largest, sum(path.stat().st_size for path in pieces))

    with serve(blocky.parent) as running:
        watcher = threading.Thread(target=watch)
        watcher.start()
        remote = read(config(f"{running.url}/blocky", tmp_path / "c", batch=2, max_bytes=limit), 0, 12)
        over.set()
        watcher.join()
        assert remote == read(config(str(blocky), tmp_path, batch=2), 0, 12)
        assert 2 * BLOCK_BYTES < largest <= limit
        with pytest.raises(RemoteError, match=r"do not fit data\.cache\.max_bytes = 1000000 "):
            read(config(f"{running.url}/blocky", tmp_path / "d", max_bytes=1_000_000), 0, 1)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hidden@host/corpus",
        "https://me:x@host/corpus?sig=hidden",
        "https://host/corpus?sig=hidden",
        "https://host/corpus?hidden",
        "https://host/corpus?sig%3Dhidden",
        "https://host/corpus%3Fsig%3Dhidden",
        "https://host/corpus;token=hidden",
        "s3://key:hidden@bucket/corpus",
        "s3://key:hid/hidden@bucket/corpus",
        "s3://key:hid?hidden@bucket/corpus",
        "s3://key:123456/hidden@bucket/corpus",
        "http://me:hidden@host:8000/corpus",
        "HTTPS://host/corpus?hidden",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    for attempt in (lambda: open_corpus(url), lambda: open_corpus([url]), lambda: config(url, tmp_path)):
        with pytest.raises(ValueError, match="fsspec's usual means") as caught:
            attempt()
        if not hasattr(
            caught.value, "errors"
        ):  # pydantic's own text repeats the input; ours (config/errors.py) does not
            assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/c/train-0?.idx",
        "hf://datasets/a:b@c/d",
        "HF://datasets/a:b@c/d",
        "s3://b/day=1/c",
        "s3://b/a@b",
        "http://host:8000/a@b",
        "http://host:8000/a:b@c",
    ],
)
def test_a_url_without_a_secret_is_taken(url: str) -> None:
    assert SourceConfig(path=url).paths == [url]


def test_a_protocol_may_have_capitals(sharded: Path, server: Server, bucket: str, tmp_path: Path) -> None:
    expected = read(config(str(sharded), tmp_path), 0, 3)
    for url in (f"{server.url}/sharded", f"{bucket}/sharded", f"file://{sharded}"):
        protocol, _, rest = url.partition("://")
        assert read(config(f"{protocol.upper()}://{rest}", tmp_path / "cache"), 0, 3) == expected


@pytest.mark.parametrize(
    ("url", "message"), [("gs://b/x", r"gs://b/x.*pip install gcsfs"), ("nope://b/x", "Protocol not known: nope")]
)
def test_a_missing_package_is_named(url: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    fetch._file_system.cache_clear()
    with pytest.raises(RemoteError, match=message):
        open_corpus(url, CacheConfig(path=str(tmp_path)))


def test_index_and_tokens_of_other_pairs_are_told_apart(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes((sharded / "train-00000.idx").read_bytes())
    (tmp_path / "a.bin").write_bytes((sharded / "train-00001.bin").read_bytes())
    with serve(tmp_path) as running, pytest.raises(ValueError, match=r"a\.bin: \d+ bytes, but .*a\.idx describes"):
        open_corpus(f"{running.url}/a", CacheConfig(path=str(tmp_path / "cache")))


def test_coming_steps_are_fetched_ahead_in_their_order(blocky: Path, tmp_path: Path) -> None:
    with serve(blocky.parent) as running:
        batches = TrainBatches(config(f"{running.url}/blocky", tmp_path / "cache", batch=1), seed=3)
        wanted = list(dict.fromkeys(piece.key for step in range(40) for piece in batches.remote_pieces(step)))
        running.behaviour = lambda path, _: "slow" if path.endswith(".bin") else "well"
        with contextlib.closing(Ahead(Cache(batches.config.cache), batches.remote_pieces, 40)) as coming:
            coming.reach(0)
            until = time.monotonic() + PATIENCE
            while len(list((tmp_path / "cache" / "pieces").glob("*[0-9]"))) < len(wanted):
                assert time.monotonic() < until
                time.sleep(0.01)
            lines = next((tmp_path / "cache" / "plans").iterdir()).read_text().split("\n")
        assert [line.split()[0] for line in lines if line] == wanted
        before = len(running.asked)
        for step in range(40):
            batches.micro_batches(step)
        assert len(running.asked) == before


def test_writers_state_blocks(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", token_dtype(10)) as writer:
        for _ in range(3):
            writer.add_documents(np.ones(3_000_000, np.int64), [3_000_000])
    facts = writer.files["a.bin"]
    data = (tmp_path / "a.bin").read_bytes()
    import xxhash

    assert facts.blocks == [
        xxhash.xxh3_64_hexdigest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)
    ]
    assert len(facts.blocks) == 3
    assert writer.files["a.idx"].blocks == []


@pytest.mark.parametrize("kind", [NoCredentialsError, partial(PartialCredentialsError, provider="env", cred_var="x")])
def test_missing_credentials_are_final(kind: Callable[[], Exception]) -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise kind()

    with pytest.raises(RemoteError, match=r"its size could not be read .*credentials"):
        fetch.again("s3://b/x", "its size", ask, fetch.TRIES)
    assert len(asked) == 1
