"""Training from a server on this machine: the numbers of a local copy, one download for all ranks, clear ends."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbline.launcher.runtime.run.status_file import read_status
from plumbline.launcher.runtime.system.exit_codes import UNREACHED
from tests.conftest import Pretrain, Run, Start
from tests.data.made import shard
from tests.data.servers import Server, serve


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard(corpus, tmp_path_factory.mktemp("served") / "sharded", [3, 11])


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serve(folder.parent) as running:
        yield running


def numbers(run: Run) -> list[dict[str, object]]:
    """Return what was trained, without what a clock measured."""
    timed = ("time", "seconds", "per_second", "mfu", "memory", "wait", "stall")
    return [
        {key: value for key, value in record.items() if not any(word in key for word in timed)}
        for record in run.records
    ]


def source(path: object, cache: Path) -> list[str]:
    return [f"data.train=[{{path: '{path}'}}]", f"data.cache.path={cache}"]


def test_a_run_from_a_server_writes_the_numbers_of_a_local_one(
    run_pretrain: Pretrain, start_pretrain: Start, tiny_config: Path, folder: Path, server: Server, tmp_path: Path
) -> None:
    local = run_pretrain(tiny_config, "from_disk", source(folder, tmp_path / "unused"), ranks=2)
    assert local.code == 0, local.stderr
    assert not (tmp_path / "unused").exists()
    server.behaviour = lambda path, before: (
        ["503", "breaks-off", "lies", "well"][min(before, 3)] if ".bin" in path else "well"
    )
    options = source(f"{server.url}/sharded", tmp_path / "cache")
    job = start_pretrain(tiny_config, "from_server", options, ranks=2)
    job.wait_until(lambda: len(job.run.records) >= 12)
    job.kill()
    resumed = run_pretrain(tiny_config, "from_server", options, ranks=2)
    assert resumed.code == 0, resumed.stderr
    assert f"into {tmp_path / 'cache'} (at most 100 GB)" in resumed.stdout + resumed.stderr
    assert numbers(resumed.run) == numbers(local.run)
    parts = {**server.count(".idx")}
    assert parts
    assert set(parts.values()) == {1}  # for two ranks, and for both attempts
    assert set(server.count("corpus.json").values()) == {1}
    assert set(server.count("tokenizer.json").values()) == {1}
    assert max(server.count(".bin").values()) <= 4  # three bad answers and a good one
    assert (resumed.run.folder / "tokenizer" / "tokenizer.json").is_file()


def test_a_shard_that_lies_ends_the_run_with_its_url(
    run_pretrain: Pretrain, tiny_config: Path, server: Server, tmp_path: Path
) -> None:
    server.behaviour = lambda path, _: "lies" if path.endswith("train-00001.bin") else "well"
    outcome = run_pretrain(tiny_config, "lied_to", source(f"{server.url}/sharded", tmp_path / "cache"), ranks=1)
    assert outcome.code == 2
    assert f"{server.url}/sharded/train-00001.bin: 3 downloads had the right length and wrong bytes" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_server_that_refuses_is_quoted(
    run_pretrain: Pretrain, tiny_config: Path, server: Server, tmp_path: Path
) -> None:
    server.behaviour = lambda *_: "403"
    outcome = run_pretrain(tiny_config, "refused", source(f"{server.url}/sharded", tmp_path / "cache"), ranks=1)
    assert outcome.code == 2
    assert re.search(r"/sharded/corpus\.json: bytes .* could not be read \(.*status 403", outcome.stderr)


def test_a_run_that_has_trained_may_try_again_where_its_server_is_away(
    run_pretrain: Pretrain, tiny_config: Path, server: Server, tmp_path: Path
) -> None:
    intervals = ["train.eval_interval=4", "checkpoint.interval=2"]
    server.behaviour = lambda path, _: "403" if path.endswith("validation.bin") else "well"
    outcome = run_pretrain(tiny_config, "away", [*source(f"{server.url}/sharded", tmp_path / "cache"), *intervals])
    assert outcome.code == UNREACHED, outcome.stderr
    assert outcome.run.checkpoints
    server.behaviour = lambda *_: "403"
    elsewhere = [*source(f"{server.url}/sharded", tmp_path / "of_another_node"), *intervals]
    outcome = run_pretrain(tiny_config, "away", elsewhere)
    assert outcome.code == UNREACHED, outcome.stderr
    status = read_status(outcome.run.folder)
    assert status is not None
    assert status.attempt.exit_code == UNREACHED


def test_a_password_is_neither_logged_nor_kept(run_pretrain: Pretrain, tiny_config: Path, tmp_path: Path) -> None:
    url = "https://me:hidden@example.invalid/corpus"
    outcome = run_pretrain(tiny_config, "secret", source(url, tmp_path), ranks=1)
    assert outcome.code == 2
    assert "fsspec's usual means" in outcome.stderr
    assert "hidden" not in outcome.stdout + outcome.stderr
    assert not outcome.run.folder.exists()
