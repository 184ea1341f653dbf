"""Room for checkpoints, and file systems that break a promise."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from plumbline.launcher.runtime.checkpoint.publishing import bytes_of_leftovers, remove_staging_folders, staging_folder
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.doctor import disk, files, shared_files, start
from plumbline.launcher.runtime.doctor.check import Check, Facts, Finding, LocalNeed, Need, Place, Report
from plumbline.launcher.runtime.doctor.start import UnfitError, check_start, local_need_of
from plumbline.launcher.runtime.ranks.world import World

if TYPE_CHECKING:
    from tests.launcher.runtime.doctor.conftest import Reports

WORLD = World(0, 0, 1, torch.device("cpu"))


def free(folder: Path) -> float:
    return float(disk.measure(Place(WORLD, folder))["free_bytes"])


def test_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    facts = disk.measure(Place(WORLD, tmp_path / "not" / "yet", Need(1e6, keep=2, present=3)))
    assert facts["folder"] == str(tmp_path)
    assert facts["more_checkpoints"] == 1, "one that is written, while the oldest still lies there"
    assert not (tmp_path / "not").exists()


def test_measured_where_a_link_leads_from_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    seen: list[Path] = []
    statvfs = os.statvfs

    def noting(folder: Path) -> os.statvfs_result:
        seen.append(folder.resolve())
        return statvfs(folder)

    monkeypatch.setattr(os, "statvfs", noting)
    disk.measure(Place(WORLD, tmp_path / "run"))
    assert seen == [tmp_path / "scratch"]


def test_what_lies_where_checkpoints_will_be_is_found_before_the_first_of_them(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first save would fail, after all the steps before it."""
    config = load_config(tiny_config, [f"run.root={tmp_path}"])
    monkeypatch.setattr(start, "AT_START", [Check("disk", disk.measure, disk.judge)])
    monkeypatch.setattr(start, "gather_objects", lambda mine, _world: [mine])
    for place in (config.run.folder, config.run.folder / "checkpoints"):
        told = f"{place} is a file, or a link that leads to no folder; move it away"
        place.touch()
        with pytest.raises(UnfitError, match=told):
            check_start(config, plan_run(config), WORLD)
        place.unlink()
        config.run.folder.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnfitError, match=told):
        check_start(config, plan_run(config), WORLD)
    (tmp_path / "elsewhere").mkdir()
    check_start(config, plan_run(config), WORLD)


@pytest.mark.parametrize(
    ("free_bytes", "present", "level"),
    [(3.1e9, 0, "ok"), (2.9e9, 0, "warning"), (2.9e9, 1, "ok"), (0.9e9, 0, "bad"), (0.9e9, 2, "bad")],
)
def test_room_for_one_and_for_all_that_stay(
    reports: Reports, tmp_path: Path, free_bytes: float, present: int, level: str
) -> None:
    place = Place(WORLD, tmp_path, Need(1e9, keep=2, present=present))
    plenty, little = disk.measure(place), disk.measure(place)
    plenty["free_bytes"], little["free_bytes"] = 1e15, free_bytes
    (found,) = disk.judge(reports([plenty, little]))
    assert (found.level, found.node) == (level, "all"), "of a disk that all share no node is to blame"
    assert found.text.endswith("; quotas are not seen") == (level == "ok")
    little["folder"] = "/"
    (found,) = disk.judge(reports([plenty, little]))
    assert found.node == ("all" if level == "ok" else "n1"), "this one lacks what the others have mounted"


def test_what_killed_saves_left_is_as_good_as_free(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start deletes it, but only after this check, which would refuse it."""
    config = load_config(tiny_config, [f"run.root={tmp_path}"])
    root = config.run.folder / "checkpoints"
    staging = staging_folder(root, 7)
    assert bytes_of_leftovers(root) == 0
    (staging / "shards").mkdir(parents=True)
    (staging / "shards" / "rank").write_bytes(bytes(3000))
    assert bytes_of_leftovers(root) == 3000
    asked: list[Place] = []

    def measure(place: Place) -> Facts:
        asked.append(place)
        return {}

    monkeypatch.setattr(start, "AT_START", [Check("some", measure, lambda _: [])])
    monkeypatch.setattr(start, "gather_objects", lambda mine, _world: [mine])
    check_start(config, plan_run(config), WORLD)
    assert asked[0].need is not None
    assert asked[0].need.leftovers == 3000
    need = replace(asked[0].need, leftovers=10**18)
    assert disk.measure(replace(asked[0], need=need))["free_bytes"] > 10**18
    remove_staging_folders(root)
    assert bytes_of_leftovers(root) == 0


def test_nodes_of_which_something_bad_is_known_are_those_to_do_without(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with all of them, or with the disk that they share, is no reason to change nodes."""
    config = load_config(tiny_config, [f"run.root={tmp_path}"])
    plan = plan_run(config)
    bad = [Finding("bad", "n3", "runs another Python"), Finding("bad", "all", "the disk is full")]
    checks = [Check("some", lambda _place: {}, lambda _reports: [*bad, Finding("warning", "n2", "has another umask")])]
    monkeypatch.setattr(start, "AT_START", checks)
    for nodes, blamed in ((["n3", "n4"], ["n3"]), (["n3"], [])):
        monkeypatch.setattr(start, "gather_objects", lambda mine, _world, nodes=nodes: [(n, mine[1]) for n in nodes])
        with pytest.raises(UnfitError, match="n3: runs another Python") as refused:
            check_start(config, plan, WORLD)
        assert refused.value.nodes == blamed


def test_a_node_without_room_for_what_its_ranks_keep_there_is_named(reports: Reports, tmp_path: Path) -> None:
    """It goes without; the others and the run do not."""
    place = Place(WORLD, tmp_path, local=LocalNeed(tmp_path / "not" / "yet", 1e6, copies=2))
    facts = disk.measure(place)
    assert (facts["local_folder"], facts["local_bytes"]) == (str(tmp_path), 2e6)
    for free_bytes, level in ((4.1e6, "ok"), (3.9e6, "warning")):
        of_node = [{**facts, "local_free_bytes": free_bytes, "local_bytes": need} for need in (2e6, 2e6)]
        (found,) = disk.judge([Report(rank, "n1", facts) for rank, facts in enumerate(of_node)])
        assert found.level == level
    assert found.node == "n1"
    assert "local checkpoints of the node's 2 rank(s) take 4.0 MB" in found.text
    of_another = Report(2, "n2", {**facts, "local_free_bytes": 2.1e6})
    assert [one.node for one in disk.judge([Report(0, "n1", of_node[0]), of_another])] == ["all"]


def test_inodes_run_out_as_well(reports: Reports, tmp_path: Path) -> None:
    facts = disk.measure(Place(WORLD, tmp_path))
    for count, level in ((50, "bad"), (10_000, "ok"), (None, "ok")):
        facts["free_files"] = count
        assert [finding.level for finding in disk.judge(reports([facts]))] == [level]
    elsewhere = {**facts, "folder": "/", "free_files": 50, "free_bytes": 2 * facts["free_bytes"]}
    (found,) = disk.judge(reports([facts, elsewhere]))
    assert found.node == "n1", "the one that has few, not the one with the least space"


def test_a_real_file_system_keeps_its_promises_and_is_left_as_it_was(reports: Reports, tmp_path: Path) -> None:
    facts = files.measure(Place(WORLD, tmp_path / "run"))
    assert facts["problems"] == []
    assert facts["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert [finding.level for finding in files.judge(reports([facts]))] == ["ok"]


def copy_in_place(source: Path, target: Path) -> Path:
    """Rename as a file system does that has no rename: by writing over what is there."""
    Path(target).write_text(source.read_text())
    os.unlink(source)  # noqa: PTH108 - Path's own methods are what is replaced
    return Path(target)


def test_a_rename_that_writes_over_the_old_file_is_found(
    reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "replace", copy_in_place)
    facts = files.measure(Place(WORLD, tmp_path))
    assert facts["problems"] == ["a file that is open does not survive its replacement"]
    (found,) = files.judge(reports([{**facts, "problems": []}, facts]))
    assert (found.level, found.node) == ("bad", "n1")


def test_a_folder_that_cannot_be_written_is_found(
    reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Iterator[str]:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(files, "problems_of", refuse)
    (found,) = files.judge(reports([files.measure(Place(WORLD, tmp_path))]))
    assert found.level == "bad"
    assert "fails (Disk quota exceeded) in " in found.text


def test_a_umask_that_hides_files_is_bad_and_another_one_worth_a_warning(reports: Reports, tmp_path: Path) -> None:
    def mode(umask: int) -> dict[str, Any]:
        before = os.umask(umask)
        try:
            return files.measure(Place(WORLD, tmp_path))
        finally:
            os.umask(before)

    usual = mode(0o022)
    assert usual["mode"] == 0o644
    for umask, level in ((0o022, "ok"), (0o077, "warning"), (0o222, "bad")):
        facts = {**usual, "mode": 0o666 & ~umask}
        assert [finding.level for finding in files.judge(reports([usual, usual, facts]))] == [level]
    assert mode(0o077)["mode"] == 0o600


def shared(**changes: Any) -> dict[str, Any]:
    return {"folder": "/runs", "missing": [], "seconds": 0.1, "locks": {"fcntl": "refused"}, **changes}


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"missing": [0]}, "bad", "rank 1 does not see a file that rank 0 (n0) has written in /runs"),
        ({"seconds": 40.0}, "warning", "rank 1 sees files of other ranks 40 s late in /runs"),
        ({"locks": {"fcntl": "taken"}}, "warning", "rank 1 got a lock that rank 0 holds (fcntl) in /runs: "),
        ({"locks": {"fcntl": "No locks available"}}, "warning", "rank 1 cannot lock (No locks available) (fcntl)"),
    ],
)
def test_what_ranks_do_not_see_of_each_other(reports: Reports, changes: dict[str, Any], level: str, text: str) -> None:
    main = shared(locks={"fcntl": "held"})
    assert [finding.level for finding in shared_files.judge(reports([main, shared()]))] == ["ok"]
    (found,) = shared_files.judge(reports([main, shared(**changes)]))
    assert (found.level, found.node) == (level, "n1")
    assert found.text.startswith(text)


def test_what_another_rank_left_on_the_node_is_no_checkpoint_of_this_one(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config, [f"checkpoint.local.path={tmp_path}", "checkpoint.local.interval=5"])
    copies = []
    for rank in (None, 0, 1):
        if rank is not None:
            (tmp_path / f"{config.run.name}-0123" / f"rank_{rank:05d}").mkdir(parents=True)
        need = local_need_of(config, plan_run(config), World(1, 0, 2, torch.device("cpu")))
        assert need is not None
        copies.append(need.copies)
    assert copies == [2, 2, 1]


def test_a_disk_of_a_node_that_cannot_be_listed_does_not_end_its_rank_alone(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config, [f"checkpoint.local.path={tmp_path}", "checkpoint.local.interval=5"])
    plan = plan_run(config)

    def broken(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "glob", broken)
    need = local_need_of(config, plan, World(1, 0, 2, torch.device("cpu")))
    assert need is not None
    assert need.copies == 2
