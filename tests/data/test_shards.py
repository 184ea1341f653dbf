"""Corpora of many pairs: the same tokens, windows and order as in one pair, however the pairs are listed."""

import json
import os
import resource
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plumbline.data.config import DataConfig
from plumbline.data.corpus import Corpus, open_corpus, read_manifest
from plumbline.data.damage import DamagedFileError
from plumbline.data.loader import TrainBatches
from plumbline.data.preparation.verifying import verify
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.shards import _kept, most_open
from tests.data.conftest import MakePair
from tests.data.made import shard, simulate, write_pairs

DOCUMENTS = [3, 5, 1, 8, 2, 13, 4, 1, 1, 30, 6, 7]


def same_stream(one: Corpus, many: Corpus, lengths: Sequence[int] = (1, 4, 7, 50)) -> None:
    whole, parts = one.splits["train"], many.splits["train"]
    assert (parts.num_tokens, parts.num_documents) == (whole.num_tokens, whole.num_documents)
    for length in lengths:
        assert parts.evaluation_windows(length) == whole.evaluation_windows(length)
        for number in range(whole.evaluation_windows(length)):
            for expected, actual in zip(whole.read(number, length), parts.read(number, length), strict=True):
                np.testing.assert_array_equal(expected, actual)


@pytest.mark.parametrize(
    "groups",
    [
        [DOCUMENTS[:4], DOCUMENTS[4:]],
        [DOCUMENTS[:1], [], DOCUMENTS[1:9], DOCUMENTS[9:], []],
        [[length] for length in DOCUMENTS],
    ],
)
def test_many_pairs_read_as_one(make_pair: MakePair, tmp_path: Path, groups: list[list[int]]) -> None:
    one = make_pair(DOCUMENTS, "one")
    write_pairs(tmp_path / "many", groups)
    same_stream(one, open_corpus(tmp_path / "many"))


def test_a_list_a_glob_and_a_folder_are_the_same_corpus(tmp_path: Path) -> None:
    prefixes = [str(prefix) for prefix in write_pairs(tmp_path / "web", [[9], [4, 4], [7]])]
    ways: list[str | list[str]] = [
        prefixes,
        [f"{prefixes[2]}.bin", prefixes[0], f"{prefixes[1]}.idx"],
        str(tmp_path / "web"),
        str(tmp_path / "web" / "part-*"),
        [str(tmp_path / "web" / "part-0[12].idx"), prefixes[0]],
    ]
    corpora = [open_corpus(way) for way in ways]
    assert {corpus.name for corpus in corpora} == {"web"}
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    for corpus in corpora:
        same_stream(corpora[0], corpus)
        assert corpus.splits["train"].indexed.read(0, 100).tolist() == list(range(24))
    assert open_corpus([prefixes[1]]).fingerprint == open_corpus(prefixes[1]).fingerprint
    other = write_pairs(tmp_path / "other", [[4, 4], [9], [7]])
    assert open_corpus([str(prefix) for prefix in other]).fingerprint != corpora[0].fingerprint


def test_a_list_with_nothing_or_twice_the_same_is_refused(tmp_path: Path, byte_corpus: Path) -> None:
    first, second = (str(prefix) for prefix in write_pairs(tmp_path / "web", [[9], [4]]))
    with pytest.raises(ValueError, match=r"typo-\*: no \.idx file here"):
        open_corpus([first, str(tmp_path / "typo-*")])
    with pytest.raises(ValueError, match=r"part-00 is in the list already"):
        open_corpus([first, second, f"{first}.bin"])
    with pytest.raises(ValueError, match=r"part-01 is in the list already"):
        open_corpus([second, str(tmp_path / "web")])
    (tmp_path / "link").symlink_to("web")
    for spelling in (f"{tmp_path}/./web/part-00", f"{tmp_path}/web/../web/part-00", f"{tmp_path}/link/part-00"):
        with pytest.raises(ValueError, match=r"part-00 is in the list already"):
            open_corpus([first, spelling])
    with pytest.raises(ValueError, match="empty list"):
        open_corpus([])
    with pytest.raises(ValueError, match="a whole corpus in a list of pairs"):
        open_corpus([first, str(byte_corpus)])
    Path(f"{second}.bin").unlink()
    with pytest.raises(ValueError, match=r"part-01\.bin: no such file"):
        open_corpus([first, second])


def test_a_manifest_names_shards(byte_corpus: Path, tmp_path: Path) -> None:
    whole, sharded = open_corpus(byte_corpus), open_corpus(shard(byte_corpus, tmp_path / "s", [5, 5, 31]))
    same_stream(whole, sharded, lengths=(41, 50))
    assert verify(tmp_path / "s")[1] == []
    assert sharded.fingerprint != whole.fingerprint
    assert open_corpus(shard(byte_corpus, tmp_path / "t", [6, 31])).fingerprint != sharded.fingerprint
    config = {"train": [{"path": str(tmp_path / "s")}], "sequence_length": 16, "global_batch_size": 4}
    batches = TrainBatches(DataConfig.model_validate({**config, "micro_batch_size": 2}), seed=0)
    assert next(iter(batches.iterate(10**6, 10**6 + 1)))[0]["input_ids"].shape == (2, 16)


@pytest.mark.parametrize("cuts", [[], [5, 31]])
def test_documents_of_several_sequences_are_counted_once(
    byte_corpus: Path, tmp_path: Path, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format counts 2^31 - 1 tokens in one sequence; here, it is as if it were 300."""
    monkeypatch.setattr("plumbline.data.indexed.LONGEST_SEQUENCE", 300)
    folder, cache = shard(byte_corpus, tmp_path / "s", cuts), CacheConfig(path=str(tmp_path / "cache"))
    whole = open_corpus(byte_corpus)
    for address in (str(folder), f"file://{folder}"):
        found = open_corpus(address, cache)
        same_stream(whole, found, lengths=(41, 50))
        assert verify(address)[1] == []
    manifest = json.loads((folder / "corpus.json").read_text())
    for wrong in (-1, 1):
        there = {**manifest["splits"]["train"], "documents": whole.splits["train"].num_documents + wrong}
        changed = {**manifest, "splits": {**manifest["splits"], "train": there}}
        (folder / "corpus.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"train-00000\.bin.* documents, corpus\.json expects"):
            open_corpus(f"file://{folder}", cache)


def test_damage_to_a_shard_is_named(byte_corpus: Path, tmp_path: Path) -> None:
    folder = shard(byte_corpus, tmp_path / "s", [5, 31])
    data = bytearray((folder / "train-00001.bin").read_bytes())
    data[-1] ^= 1
    (folder / "train-00001.bin").write_bytes(data)
    (damage,) = verify(folder)[1]
    assert damage.startswith("train-00001.bin: checksum ")
    (folder / "train-00001.bin").write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"train-00001\.bin: has \d+ bytes, corpus\.json expects"):
        open_corpus(folder)
    manifest = json.loads((folder / "corpus.json").read_text())
    del manifest["files"]["train-00001.bin"]
    (folder / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"corpus\.json: no size and checksum of train-00001\.bin"):
        open_corpus(folder)


def test_whether_all_files_are_looked_at_is_for_the_caller_to_say(
    byte_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shard(byte_corpus, tmp_path / "s", range(1, 36))
    looked_at: list[str] = []

    def look(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        looked_at.append(Path(path).name)
        return stat(path, *arguments, **options)

    stat = os.stat
    monkeypatch.setattr("os.stat", look)
    corpus = open_corpus(folder, check_sizes=False)
    assert not [name for name in looked_at if name.startswith("train-")]
    corpus.check_sizes()
    files = [f"train-{number:05}.{ending}" for number in range(36) for ending in ("bin", "idx")]
    assert sorted(name for name in looked_at if name.startswith("train-")) == files
    for number in (30, 17):
        (folder / f"train-{number:05}.idx").unlink()
    for look_at_all in (corpus.check_sizes, partial(open_corpus, folder)):
        with pytest.raises(ValueError, match=r"train-00017\.idx: is missing, corpus\.json expects \d+ bytes"):
            look_at_all()
    assert open_corpus(folder, check_sizes=False).splits["train"].read(0, 20).inputs.size == 20
    with pytest.raises(DamagedFileError, match=r"train-00017\.idx: no such file"):
        corpus.splits["train"].read(0, corpus.splits["train"].num_tokens)


@pytest.mark.parametrize("remote", [False, True])
def test_shards_of_other_tokens_than_stated_are_named(byte_corpus: Path, tmp_path: Path, remote: bool) -> None:
    folder = shard(byte_corpus, tmp_path / "s", [5, 31])
    manifest = json.loads((folder / "corpus.json").read_text())
    manifest["vocab_size"] = 70_000  # which takes 4 bytes
    del manifest["splits"]["validation"]
    manifest["splits"]["train"]["tokens"] = sum(
        manifest["files"][f"train-{number:05}.bin"]["size"] // 4 for number in range(3)
    )
    (folder / "corpus.json").write_text(json.dumps(manifest))
    address = f"file://{folder}" if remote else str(folder)
    corpus = open_corpus(address, CacheConfig(path=str(tmp_path / "cache")))
    with pytest.raises(DamagedFileError, match=r"train-00000\.(bin|idx): .* corpus"):
        corpus.splits["train"].read(0, 4)


def test_shards_leave_open_files_to_others() -> None:
    assert [most_open(files) for files in (1024, 4096, 20_000, 65_536, resource.RLIM_INFINITY)] == [
        64, 1024, 8976, 16_384, 16_384
    ]  # fmt: skip


@pytest.mark.parametrize("files", [2500, 100_000])
def test_as_many_shards_stay_open_as_a_process_may_have_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    write_pairs(tmp_path / "many", [[3]] * 250, [f"part-{number:03}" for number in range(250)])
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    _kept.cache_clear()
    try:
        corpus = open_corpus(tmp_path / "many")
        assert corpus.splits["train"].read(0, 750).inputs.tolist() == list(range(749))
        numbers = Path("/proc/self/fd").iterdir()
        opened = [name for name in map(os.path.realpath, numbers) if Path(name).parent == tmp_path / "many"]
        assert len(opened) == 2 * min(250, most_open(files))
    finally:
        _kept.cache_clear()


def test_checksums_of_blocks_are_held_only_where_blocks_are_checked(byte_corpus: Path, tmp_path: Path) -> None:
    folder = simulate(byte_corpus, tmp_path / "large", 3, 10**7)
    corpora = [open_corpus(place, CacheConfig(path=str(tmp_path / "cache"))) for place in (folder, f"file://{folder}")]
    manifests = [*(corpus.manifest for corpus in corpora), read_manifest(folder)]
    assert [manifest and len(manifest.files["train-00002.bin"].blocks) for manifest in manifests] == [0, 3, 3]
    assert corpora[0].fingerprint == corpora[1].fingerprint


def test_a_trillion_tokens_in_ten_thousand_shards_take_little_memory(byte_corpus: Path, tmp_path: Path) -> None:
    folder = simulate(byte_corpus, tmp_path / "huge", 10_000, 10**8)
    config = DataConfig.model_validate(
        {"train": [{"path": str(folder)}], "sequence_length": 2048, "global_batch_size": 64, "micro_batch_size": 64}
    )
    tracemalloc.start()
    batches = TrainBatches(config, seed=0)
    assert batches.corpora["huge"].splits["train"].training_windows(1) == 10**12 - 1
    for step in (0, 10**6, 10**9):
        batches.micro_batches(step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000
