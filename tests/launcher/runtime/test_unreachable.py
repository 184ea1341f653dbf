"""What cannot be reached is not missing, though Path.exists and its like say so from Python 3.14 on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.data.disk import is_file, is_there
from plumbline.data.folders import LocalFolder
from plumbline.launcher.runtime.checkpoint import store
from plumbline.launcher.runtime.checkpoint.branch import resolve
from plumbline.launcher.runtime.checkpoint.local import _identify
from plumbline.launcher.runtime.cluster.attempts import EndedAttempt, decide
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.run.chain import CHAIN, ChainFile
from plumbline.launcher.runtime.run.folder import read_result
from plumbline.launcher.runtime.run.interventions import INTERVENTIONS, read_interventions
from plumbline.launcher.runtime.run.lock import LOCK, hold, owner_of
from plumbline.launcher.runtime.run.starts import STARTS, read_starts
from plumbline.launcher.runtime.run.status_file import ATTEMPTS, RESULT, STATUS, read_attempts, read_status
from plumbline.launcher.runtime.sweep.advance import DIVERGED, Share
from plumbline.launcher.runtime.sweep.worker import outcome_of
from plumbline.launcher.runtime.system.files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from plumbline.launcher.runtime.config.schema import Config

BRANCH = ["schedule.branch.checkpoint=parent", "schedule.branch.steps=1"]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return what makes a file unreachable, under a pathlib like that of Python 3.14."""
    lost: set[Any] = set()
    stat = os.stat

    def answer(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if path in lost:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", answer)
    for name, told in (("exists", os.path.exists), ("is_file", os.path.isfile), ("is_dir", os.path.isdir)):
        monkeypatch.setattr(Path, name, told)  # which catch every OSError, as Path's own methods do there
    return lost.add


def test_what_is_there_is_told_from_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nothing")
    there = [tmp_path, tmp_path / "file", tmp_path / "link"]
    missing = [tmp_path / "broken", tmp_path / "none" / "file", tmp_path / "file" / "file", tmp_path / "nu\0ll"]
    assert [is_there(path) for path in [*there, *missing]] == [True] * 3 + [False] * 4
    assert [is_file(path) for path in [*there, *missing]] == [False, True, True] + [False] * 4


def problems(config: Config) -> list[str]:
    """Return the problems of a checkpoint of one file."""
    facts = {"step": 3, "format": store.FORMAT, "files": {"state.json": {"bytes": 1, "xxh3": "0" * 16}}}
    sealed = {**facts, "checksum": store.manifest_checksum(facts)}
    write_json(config.run.folder / store.MANIFEST, sealed)
    return store.problems(config.run.folder)


def held(config: Config) -> None:
    """Take the lock of a run, of which an earlier attempt may still be alive."""
    with hold(config.run.folder, pulse=config.run.folder / STATUS):
        pass


@pytest.mark.parametrize(
    ("name", "use"),
    [
        pytest.param("state.json", problems, id="a checkpoint is not passed over"),
        pytest.param(RESULT, read_result, id="a complete run is not incomplete"),
        pytest.param(RESULT, outcome_of, id="nor one of a sweep"),
        pytest.param(DIVERGED, lambda c: Share(c.run.folder, "", lambda: [c.run.folder]).saved(), id="nor to a job"),
        pytest.param("config.yaml", resolve, id="a branch is not begun anew"),
        pytest.param(INTERVENTIONS, lambda c: read_interventions(c.run.folder), id="skipped data is not forgotten"),
        pytest.param("corpus.json", lambda c: LocalFolder(c.run.folder).has("corpus.json"), id="a corpus is there"),
        pytest.param("tokenizer/tokenizer.json", lambda c: LocalFolder(c.run.folder).tokenizer(""), id="a tokenizer"),
        pytest.param("checkpoints/local_id", lambda c: _identify(c.run.folder), id="checkpoints on nodes stay ours"),
        pytest.param("attempts.json", lambda c: decide(EndedAttempt(1, (5,), (5,)), c.run.folder / "attempts.json", 2),
                     id="attempts stay counted"),
        pytest.param(STATUS, held, id="an earlier attempt may be alive"),
        pytest.param(LOCK, lambda c: owner_of(c.run.folder), id="a lock may be held"),
        pytest.param(STARTS, lambda c: list(read_starts(c.run.folder)), id="earlier starts are not forgotten"),
        pytest.param(CHAIN, lambda c: ChainFile(c.run.folder, 0), id="a chain is not begun anew"),
        pytest.param(STATUS, lambda c: read_status(c.run.folder), id="a status is there"),
        pytest.param(ATTEMPTS, lambda c: read_attempts(c.run.folder), id="earlier attempts are not forgotten"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_reached_is_an_error(
    name: str, use: Callable[[Config], object], tiny_config: Path, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    config = load_config(tiny_config, [f"run.root={tmp_path}", *(BRANCH if use is resolve else [])])
    file = config.run.folder / name
    file.parent.mkdir(parents=True)
    file.touch()
    lose(file)
    with pytest.raises(OSError, match=f"Stale file handle: '{file}'"):
        use(config)
