"""The folder that pieces of remote files are kept in: its limit, what goes first, processes that share it and die."""

import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import numpy as np
import pytest

from plumbline.data.config import DataConfig
from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.damage import DamagedFileError
from plumbline.data.disk import AWAY
from plumbline.data.indexed import file_facts
from plumbline.data.pairs import open_pairs
from plumbline.data.remote.cache import Cache, CacheConfig
from plumbline.data.remote.fetch import RemoteError
from plumbline.data.remote.files import RemoteFile, unchecked
from plumbline.data.remote.piece import Piece
from plumbline.data.remote.shelf import Shelf
from plumbline.data.remote.tokens import RemoteTokens
from plumbline.launcher.runtime.config.resolve import vocab_size
from tests.conftest import PATIENCE, REPOSITORY, environment
from tests.data.servers import Server, serve


def pieces_of_size(folder: Path, url: str, size: int, count: int) -> list[Piece]:
    """Make files on a server; return each as a piece."""
    for number in range(count):
        (folder / f"{number}").write_bytes(bytes([number]) * size)
    return [unchecked(f"{url}/{number}").whole() for number in range(count)]


def kept(cache: Cache, pieces: list[Piece]) -> list[int]:
    names = {path.name for path in (cache.folder / "pieces").iterdir()}
    return [number for number, piece in enumerate(pieces) if piece.key in names]


def test_a_folder_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(CacheConfig(path=str(tmp_path)))
    refusal = PermissionError(errno.EACCES, "Permission denied", f"{tmp_path}/lock")
    monkeypatch.setattr(os, "open", Mock(side_effect=refusal))  # root, who may run this, is never refused
    words = rf"data\.cache\.path = {tmp_path}: {tmp_path}/lock cannot be written"
    with pytest.raises(RemoteError, match=words), cache.locked():
        pass


def test_what_another_user_made_is_not_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, piece = CacheConfig(path=str(tmp_path / "cache")), RemoteFile("http://nobody.invalid/0", 1, None).whole()
    with Cache(config).locked():
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:  # whose folders anyone may use
        os.chown(tmp_path / "cache", 1234, -1)
    owner = (tmp_path / "cache").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for use in (Cache(config).locked().__enter__, Cache(config).plan, lambda: Cache(config).open(piece)):
        with pytest.raises(
            RemoteError, match=rf"data\.cache\.path = {tmp_path}/cache: .*belongs to user {owner}\); choose another"
        ):
            use()
    for user in (0, owner):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with Cache(config).locked():
            pass


@pytest.mark.parametrize(("path", "reason"), [("file", "it is no folder"), ("file/cache", "Not a directory")])
def test_a_folder_that_cannot_be_is_named(sharded: Path, tmp_path: Path, path: str, reason: str) -> None:
    """And not the corpus, of which the vocabulary is asked first."""
    (tmp_path / "file").write_text("")
    cache = Cache(CacheConfig(path=str(tmp_path / path)))
    for use in (cache.locked().__enter__, cache.plan, lambda: vocabulary(sharded, tmp_path / path)):
        with pytest.raises(
            RemoteError, match=rf"data\.cache\.path = {tmp_path}/{path}: .*\({reason}\); choose another"
        ):
            use()


@pytest.mark.parametrize("part", ["lock", "held", "pieces", "plans", "tokenizers.lock", "tokenizers"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_folder_that_is_full_or_read_only_is_named(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, code: int
) -> None:
    cache, (piece,) = Cache(CacheConfig(path=str(tmp_path / "cache"))), local_pieces(tmp_path / "there", [1000])
    cache.plan().close()
    opened = os.open, io.open

    def refused(path: object, writes: bool) -> None:
        if writes and str(path).startswith(f"{tmp_path}/cache/{part}"):
            raise OSError(code, os.strerror(code), str(path))

    def low(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        refused(path, bool(flags & os.O_CREAT))
        return opened[0](path, flags, *rest, **named)

    def high(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        refused(path, "w" in mode)
        return opened[1](path, mode, *rest, **named)

    monkeypatch.setattr(os, "open", low)
    monkeypatch.setattr(io, "open", high)
    uses: dict[str, Callable[[], object]] = {
        "plans": cache.plan,
        "tokenizers": lambda: open_corpus(f"file://{sharded}", cache._config),
    }
    use = uses.get(part.partition(".")[0], lambda: cache.open(piece))
    if code in AWAY:  # of a disk that will be back, for which a job starts again
        with pytest.raises(OSError, match="Stale") as raised:
            use()
        assert raised.value.errno == code
        return
    words = rf"data\.cache\.path = {tmp_path}/cache: {tmp_path}/cache/{part}.*\({os.strerror(code)}\); choose another"
    with pytest.raises(RemoteError, match=words):
        use()


def vocabulary(corpus: Path, cache: Path) -> int:
    source = {"path": f"file://{corpus}"}
    data = {"train": [source], "sequence_length": 8, "global_batch_size": 1, "micro_batch_size": 1}
    return vocab_size(DataConfig.model_validate({**data, "cache": {"path": str(cache)}}))


@pytest.mark.parametrize("name", ["lock", "held"])
def test_links_in_the_folder_are_not_written_through(tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "own").write_text("own")
    (tmp_path / "cache" / name).symlink_to(tmp_path / "own")
    cache = Cache(CacheConfig(path=str(tmp_path / "cache")))
    with pytest.raises(OSError, match=rf"{tmp_path}/cache/{name}"):
        cache.forget(RemoteFile("http://nobody.invalid/0", 1, None).whole())
    assert (tmp_path / "own").read_text() == "own"


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, piece = Cache(CacheConfig(path=str(tmp_path))), RemoteFile("http://nobody.invalid/0", 1000, None).whole()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    for use in (lambda: cache.locked().__enter__(), cache.plan, lambda: cache.open(piece)):
        with pytest.raises(OSError, match=rf"data\.cache\.path = {tmp_path}: files there cannot be locked .*another"):
            use()


def test_what_is_needed_last_goes_first(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with serve(tmp_path / "served") as running:
        pieces = pieces_of_size(tmp_path / "served", running.url, 1000, 7)
        cache = Cache(CacheConfig(path=str(tmp_path / "cache"), max_bytes=4500))
        for number in (0, 1, 2, 3):
            cache.open(pieces[number]).close()
            time.sleep(0.01)
        mine, others = cache.plan(), cache.plan()
        mine.write({pieces[0].key: 9, pieces[2].key: 2, pieces[3].key: 5})
        others.write({pieces[0].key: 1})
        assert cache.fetch(pieces[4], 3)
        assert kept(cache, pieces) == [0, 2, 3, 4]  # nobody planned to read 1
        mine.write({pieces[0].key: 9, pieces[2].key: 2, pieces[3].key: 5, pieces[4].key: 3})
        assert cache.fetch(pieces[5], 4)
        assert kept(cache, pieces) == [0, 2, 4, 5]  # 3 was needed last, and 0 by another process soon
        mine.write({pieces[number].key: number for number in (2, 4, 5)})
        assert not cache.fetch(pieces[6], 6)  # all else is needed sooner
        assert kept(cache, pieces) == [0, 2, 4, 5]
        cache.open(pieces[6]).close()  # but what a reader waits for is had
        assert kept(cache, pieces) == [0, 2, 4, 6]
        others.close()
        mine.write({pieces[number].key: number for number in (2, 4, 6)})
        cache.open(pieces[5]).close()
        assert kept(cache, pieces) == [2, 4, 5, 6]  # the process that needed 0 is gone
        mine.close()


def local_pieces(folder: Path, sizes: Sequence[int]) -> list[Piece]:
    """Make files on this machine; return each as a piece of a remote one."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / f"{number}").write_bytes(bytes(size))
    return [unchecked(f"file://{folder}/{number}").whole() for number in range(len(sizes))]


def in_pieces(cache: Cache) -> dict[str, tuple[int, int]]:
    """Return size and time of last use of each file."""
    listed = {path.name: path.stat() for path in (cache.folder / "pieces").glob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in listed.items()}


def what_stays(before: dict[str, tuple[int, int]], needs: dict[str, int], steps: int, excess: int) -> set[str] | None:
    """Return what is left when room is made by the rule, from a listing; None if not enough may go."""
    stays = set(before)
    for name in sorted(before, key=lambda name: (-needs.get(name, 99), before[name][1])):
        if excess <= 0 or needs.get(name, 99) <= steps:
            break
        stays.remove(name)
        excess -= before[name][0]
    return None if excess > 0 else stays


def test_what_goes_is_what_a_listing_would_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, each with what it knows of a folder that it seldom lists, and plans that change."""
    draw = np.random.default_rng(0)
    pieces = local_pieces(tmp_path / "there", draw.integers(1, 900, 60).tolist())
    caches = [Cache(CacheConfig(path=str(tmp_path / "cache"), max_bytes=13_000)) for _ in range(2)]
    plans = [cache.plan() for cache in caches]
    listings: list[Shelf] = []
    recount = Shelf.recount

    def counted(self: Shelf) -> int:
        listings.append(self)
        return recount(self)

    monkeypatch.setattr(Shelf, "recount", counted)
    needs: list[dict[str, int]] = [{}, {}]
    gone = 0
    for turn in range(500):
        who, piece, steps = turn % 2, pieces[draw.integers(60)], int(draw.integers(-1, 9))
        if turn % 10 < 2:
            needs[who] = {pieces[number].key: int(draw.integers(9)) for number in draw.integers(0, 60, 6)}
            plans[who].write(needs[who])
        soonest = {key: min(each[key] for each in needs if key in each) for key in {**needs[0], **needs[1]}}
        before = in_pieces(caches[0])
        excess = sum(size for size, _ in before.values()) + piece.size + caches[0]._other_bytes() - 13_000
        stays = set(before) if piece.key in before else what_stays(before, soonest, steps, excess)
        assert caches[who].fetch(piece, steps) == (stays is not None)
        after = in_pieces(caches[0])
        assert set(after) == (set(before) if stays is None else stays | {piece.key})
        assert caches[who]._shelf.held() == sum(size for size, _ in after.values())
        if piece.key in after:
            caches[who].open(piece).close()
            os.utime(tmp_path / "cache" / "pieces" / piece.key, ns=(turn + 2 * 10**18,) * 2)  # each later than the last
        gone += len(set(before) - set(after))
    assert gone > 150
    assert len(listings) < gone / 4


def test_a_count_that_is_wrong_is_set_right(tmp_path: Path) -> None:
    """A process is killed after it wrote down what it was about to fetch; or the machine is started anew."""
    pieces = local_pieces(tmp_path / "there", [1000] * 5)
    cache = Cache(CacheConfig(path=str(tmp_path / "cache"), max_bytes=4500))
    account = tmp_path / "cache" / "held"
    for piece in pieces[:3]:
        cache.open(piece).close()
    boot, held = account.read_text().split()
    assert held == "3000"
    for wrong in (f"{boot} 4000\n", "another-start 0\n", ""):
        account.write_text(wrong)
        Cache(CacheConfig(path=str(tmp_path / "cache"), max_bytes=4500)).open(pieces[3]).close()
        assert kept(cache, pieces) == [0, 1, 2, 3]  # nothing had to go
        assert account.read_text() == f"{boot} 4000\n"
        cache.forget(pieces[3])
        assert account.read_text() == f"{boot} 3000\n"


def test_processes_keep_one_count(tmp_path: Path) -> None:
    pieces = local_pieces(tmp_path / "there", [100 + 7 * number for number in range(30)])
    config = CacheConfig(path=str(tmp_path / "cache"), max_bytes=2500)

    def read(seed: int) -> None:
        cache = Cache(config)
        for number in np.random.default_rng(seed).integers(0, 30, 60):
            with cache.open(pieces[number]) as file:
                assert len(file.read()) == pieces[number].size
            if number % 5 == 0:
                cache.forget(pieces[number])

    processes = [get_context("fork").Process(target=read, args=(seed,)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    cache = Cache(config)
    assert cache._shelf.held() == sum(size for size, _ in in_pieces(cache).values())


def test_no_file_changes_its_name_while_another_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (piece,) = local_pieces(tmp_path / "there", [100])
    cache, renamed = Cache(CacheConfig(path=str(tmp_path / "cache"))), []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        with (cache.folder / "lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        renamed.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    cache.open(piece).close()
    assert renamed == [piece.key]


CHILD = """
import sys
from plumbline.data.remote.cache import Cache, CacheConfig
from plumbline.data.remote.files import RemoteFile
cache, piece = Cache(CacheConfig(path=sys.argv[1])), RemoteFile(sys.argv[2], int(sys.argv[3]), sys.argv[4]).whole()
plan = cache.plan()
plan.write({piece.key: 0})
print(len(cache.open(piece).read()))
"""


def child(*arguments: object) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(words, env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def test_processes_share_one_download_and_a_killed_one_is_taken_over(
    sharded: Path, server: Server, tmp_path: Path
) -> None:
    record = read_manifest(sharded).files["train-00001.bin"]
    arguments = (tmp_path, f"{server.url}/sharded/train-00001.bin", record.size, record.xxh3_64)
    server.behaviour = lambda _, before: "stalls" if before == 0 else "well"
    first = child(*arguments)
    until = time.monotonic() + PATIENCE
    while not (partials := list(tmp_path.rglob("*.partial"))) or not server.asked:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert partials[0].stat().st_size == record.size  # its room is taken, and half of its bytes have arrived at most
    waiting = [child(*arguments) for _ in range(2)]
    time.sleep(0.5)
    assert all(process.poll() is None for process in waiting)
    assert len(server.asked) == 1
    first.kill()
    assert [process.communicate(timeout=PATIENCE)[0] for process in waiting] == [f"{record.size}\n"] * 2
    assert len(server.asked) == 2  # the killed one's, and one for both
    assert not list(tmp_path.rglob("*.partial"))
    plan = Cache(CacheConfig(path=str(tmp_path))).plan()
    assert len(list((tmp_path / "plans").iterdir())) == 1  # those of the ended are gone
    plan.close()
    first.communicate()


def test_what_a_dead_process_left_makes_room(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "cache" / "pieces").mkdir(parents=True)
    (tmp_path / "cache" / "pieces" / "x.partial").write_bytes(bytes(4000))
    with serve(tmp_path / "served") as running:
        (piece,) = pieces_of_size(tmp_path / "served", running.url, 1000, 1)
        cache = Cache(CacheConfig(path=str(tmp_path / "cache"), max_bytes=4500))
        cache.open(piece).close()
        assert [path.stat().st_size for path in (tmp_path / "cache" / "pieces").iterdir()] == [1000]


def test_a_piece_that_others_cut_short_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with serve(tmp_path / "served") as running:
        (piece,) = pieces_of_size(tmp_path / "served", running.url, 1000, 1)
        cache = Cache(CacheConfig(path=str(tmp_path / "cache")))
        cache.open(piece).close()
        os.truncate(tmp_path / "cache" / "pieces" / piece.key, 500)
        with cache.open(piece) as file:
            assert len(file.read()) == 1000


def test_a_piece_that_is_cut_while_it_is_read_is_an_error(
    byte_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no tokens that nobody wrote."""
    stored, index = (unchecked(f"file://{byte_corpus}/train.{ending}") for ending in ("bin", "idx"))
    tokens = RemoteTokens(Cache(CacheConfig(path=str(tmp_path / "cache"))), stored, index)
    assert tokens.read(0, 10).tolist() == np.fromfile(byte_corpus / "train.bin", "<u2", 10).tolist()
    opened = Cache.open

    def cut(cache: Cache, piece: Piece) -> BinaryIO:
        file = opened(cache, piece)
        if piece != tokens.index_piece:
            os.truncate(file.name, 4)
        return file

    monkeypatch.setattr(Cache, "open", cut)
    with pytest.raises(DamagedFileError, match=r"train\.bin: a part of it was cut after it had been checked: "):
        tokens.read(0, 10)


def test_the_index_of_a_bare_pair_is_hashed_in_blocks(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index may have gigabytes, and sixteen are opened at a time."""

    class Blocks(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 <= size <= 1 << 22
            return super().read(size)

    opened = Cache.open

    def in_blocks(cache: Cache, piece: Piece) -> Blocks:
        with opened(cache, piece) as file:
            return Blocks(os.dup(file.fileno()))

    monkeypatch.setattr(Cache, "open", in_blocks)
    prefixes = [f"file://{sharded}/train-0000{number}" for number in range(2)]
    _, checksums = open_pairs(prefixes, Cache(CacheConfig(path=str(tmp_path))))
    assert checksums == [file_facts(sharded / f"train-0000{number}.idx").xxh3_64 for number in range(2)]


def test_settings_of_a_tokenizer_are_fetched_again_with_another_manifest(byte_corpus: Path, tmp_path: Path) -> None:
    there = shutil.copytree(byte_corpus, tmp_path / "there")
    cache = CacheConfig(path=str(tmp_path / "cache"))
    before = open_corpus(f"file://{there}", cache).tokenizer_path
    assert open_corpus(f"file://{there}", cache).tokenizer_path == before
    for name, key in (("tokenizer/tokenizer_config.json", "chat_template"), ("corpus.json", "tokenized_by")):
        settings = json.loads((there / name).read_text())
        (there / name).write_text(json.dumps({**settings, key: "another"}))
    after = open_corpus(f"file://{there}", cache).tokenizer_path
    assert before is not None
    assert after is not None
    told = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (before, after)]
    assert [settings.get("chat_template") for settings in told] == [None, "another"], "who holds one may still read it"
