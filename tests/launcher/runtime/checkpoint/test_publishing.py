"""Files of checkpoints whatever is killed when: what is under a final name is whole."""

import errno
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from plumbline.data import disk
from plumbline.launcher.runtime.checkpoint import publishing, store
from plumbline.launcher.runtime.config.sections import CheckpointConfig

KEEP = CheckpointConfig(keep_last=2)


class KilledError(BaseException):
    """Stand for SIGKILL, which nobody handles."""


def publish(root: Path, step: int) -> None:
    """Write a checkpoint without tensors."""
    staging = publishing.staging_folder(root, step)
    publishing.make_room(staging)
    publishing.publish(
        staging, {"step": step}, publishing.write_files({store.CONFIG: "{}", "state/x": "state"}, staging, store.silent)
    )


def test_the_folder_of_a_run_that_was_moved_is_not_made_anew(tmp_path: Path) -> None:
    """Its saves would go to a second half of the run, which nobody looks for."""
    (tmp_path / "run").mkdir()
    publish(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "run" / "checkpoints", 2)
    assert not (tmp_path / "run").exists()


def test_a_kill_while_a_checkpoint_is_deleted_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that follows may have nothing left to save: what is there is whole without another save."""
    for step in (1, 2, 3):
        publish(tmp_path, step)

    def die(folder: Path, **_options: Any) -> None:
        (folder / "state" / "x").unlink()
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(KilledError):
            publishing.prune(tmp_path, 3, KEEP, store.silent)
    found = store.checkpoints(tmp_path)
    assert [store.problems(folder, contents=True) for folder in found] == [[], []]
    publishing.tidy(tmp_path, found[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "renamed"])
def test_a_checkpoint_that_is_written_again_is_there_before_the_one_of_before_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    publish(tmp_path, 3)

    def die(*_arguments: Any, **_options: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        if not exchanges:
            patched.setattr(disk, "exchange", lambda _one, _other: False)
        with pytest.raises(KilledError):
            publish(tmp_path, 3)
    (found,) = store.checkpoints(tmp_path)
    assert store.problems(found, contents=True) == []
    publishing.tidy(tmp_path, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]


def test_a_damaged_pointer_is_written_anew(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    (tmp_path / store.POINTER).write_bytes(b"\xff\xfe\x00")
    publishing.tidy(tmp_path, tmp_path / "step_00000003")
    assert (tmp_path / store.POINTER).read_text() == "step_00000003\n"


def test_one_that_lost_its_name_to_a_kill_gets_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that cannot exchange names, between two renames."""
    publish(tmp_path, 3)
    before = store.read_manifest(tmp_path / "step_00000003")

    def move(source: Path, target: Path) -> None:
        if source.name.endswith(".staging"):
            raise KilledError
        source.replace(target)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "exchange", lambda _one, _other: False)
        patched.setattr(disk, "move", move)
        with pytest.raises(KilledError):
            publish(tmp_path, 3)
    assert store.checkpoints(tmp_path) == []
    publishing.put_back(tmp_path)
    (found,) = store.checkpoints(tmp_path)
    assert store.read_manifest(found) == before
    publishing.tidy(tmp_path, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]


def test_one_that_cannot_be_replaced_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save that was to replace it fails, and no start needs to repair what it left."""
    publish(tmp_path, 3)
    before = store.read_manifest(tmp_path / "step_00000003")
    moved = disk.move

    def move(source: Path, target: Path) -> None:
        if source.name.endswith(".staging"):
            raise OSError(errno.EIO, "away")
        moved(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "exchange", lambda _one, _other: False)
        patched.setattr(disk, "move", move)
        with pytest.raises(OSError, match="away"):
            publish(tmp_path, 3)
    (found,) = store.checkpoints(tmp_path)
    assert store.read_manifest(found) == before
    publish(tmp_path, 3)
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step_00000003"]


def test_a_pointer_that_cannot_be_written_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise OSError("no room")

    publish(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "write_whole", refuse)
        publish(tmp_path, 2)
    assert "does not name step_00000002 (no room)" in capsys.readouterr().err
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step_00000002", "step_00000001"]
    publishing.tidy(tmp_path, tmp_path / "step_00000002")
    assert (tmp_path / store.POINTER).read_text() == "step_00000002\n"


@pytest.mark.parametrize("name", ["_checksum", "read_object"])
def test_a_later_checkpoint_that_cannot_be_read_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> list[str]:
        raise OSError("no answer")

    publish(tmp_path, 9)
    publish(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(store, name, refuse)
        publishing.prune(tmp_path, 2, KEEP, store.silent)
    assert re.search("step_00000009 cannot be deleted (.*no answer)", capsys.readouterr().err)
    assert len(store.checkpoints(tmp_path)) == 2


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of files whose checksums are compared, which grows."""
    names: list[str] = []
    checksum = store._checksum

    def counted(path: Path, heartbeat: store.Heartbeat) -> str:
        names.append(path.name)
        return checksum(path, heartbeat)

    monkeypatch.setattr(store, "_checksum", counted)
    return names


def test_a_later_checkpoint_that_is_whole_is_read_once(tmp_path: Path, read: list[str]) -> None:
    """It may be of hundreds of gigabytes, and each save waits; who watches hears that it goes on."""
    publish(tmp_path, 9)
    beats: list[None] = []
    for step in (1, 2, 3):
        publish(tmp_path, step)
        publishing.prune(tmp_path, step, KEEP, lambda: beats.append(None))
    assert read.count("x") == 1
    assert len(beats) == 2
    publish(tmp_path, 9)
    (tmp_path / "step_00000009" / "state" / "x").write_text("stole")
    publishing.prune(tmp_path, 3, KEEP, store.silent)
    assert read.count("x") == 2, "it is another one"
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step_00000003", "step_00000002"]


@pytest.mark.parametrize("file", ["state/x", store.MANIFEST])
def test_what_a_resume_passed_over_is_not_kept_in_the_place_of_a_whole_one(tmp_path: Path, file: str) -> None:
    for step in (2, 3):
        publish(tmp_path, step)
    (tmp_path / "step_00000003" / file).unlink()
    publishing.tidy(tmp_path, tmp_path / "step_00000002")
    publish(tmp_path, 4)
    publishing.prune(tmp_path, 4, KEEP, store.silent)
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step_00000004", "step_00000002"]
    publish(tmp_path, 3)  # made again after the run went back
    publishing.prune(tmp_path, 4, KEEP, store.silent)
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step_00000004", "step_00000003"]


@pytest.mark.parametrize(
    ("damaged", "files"), [({"b": "stat"}, []), ({"a": "stole", "b": "stole"}, ["a"])], ids=["size", "content"]
)
def test_a_damaged_checkpoint_is_read_up_to_its_first_problem(
    tmp_path: Path, read: list[str], damaged: dict[str, str], files: list[str]
) -> None:
    """What is missing or cut is seen without reading anything."""
    staging = publishing.staging_folder(tmp_path, 9)
    publishing.make_room(staging)
    content = {store.CONFIG: "{}", "state/a": "state", "state/b": "state"}
    publishing.publish(staging, {"step": 9}, publishing.write_files(content, staging, store.silent))
    for name, text in damaged.items():
        (tmp_path / "step_00000009" / "state" / name).write_text(text)
    publishing.prune(tmp_path, 3, KEEP, store.silent)
    assert [name for name in read if name != store.CONFIG] == files
    assert store.checkpoints(tmp_path) == []


def test_a_run_that_goes_back_to_before_all_of_them_has_no_pointer_either(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    publishing.remove_after(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []
