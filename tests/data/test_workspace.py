"""Folders are published whole, by one process at a time, and leave alone what is not theirs, whatever it is called."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from plumbline.data import disk, workspace
from plumbline.data.locks import give_back, is_held, take
from plumbline.data.workspace import FolderKind, new_folder, restore, resumed_folder
from tests.data.test_prepare import leftovers

KIND = FolderKind("a folder of this test", marks=("mark",), others=())


def interrupted(output: Path, key: str) -> Path:
    """Leave the work of a process that was ended."""
    with pytest.raises(KeyboardInterrupt), resumed_folder(output, KIND, key) as folder:  # noqa: PT012
        (folder / "mark").write_text(output.name)
        raise KeyboardInterrupt
    return folder


def make(output: Path) -> None:
    with new_folder(output, KIND) as folder:
        (folder / "mark").write_text(f"new {output.name}")


def test_a_file_that_another_folder_has_as_well_keeps_its_permissions(tmp_path: Path) -> None:
    """Of a private corpus that is merged into another."""
    private = tmp_path / "private"
    private.write_text("text")
    private.chmod(0o600)
    with new_folder(tmp_path / "merged", KIND) as folder:
        os.link(private, folder / "mark")
        (folder / "own").touch(0o600)
    assert private.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "merged" / "own").stat().st_mode & 0o777 == 0o666 & ~workspace._umask()


def test_a_lock_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that held it gave it back: a lock of a file without a name would protect nothing."""
    removed = list[Path]()

    def removing(lock: int, *options: bool) -> bool:
        if not removed:
            removed.extend(tmp_path.glob(".made.*.lock"))
            removed[0].unlink()
        return is_held(lock, *options)

    monkeypatch.setattr("plumbline.data.locks.is_held", removing)
    with resumed_folder(tmp_path / "made", KIND, "abc") as folder:
        (folder / "mark").touch()
        assert removed == [tmp_path / ".made.abc.lock"]
        assert take(removed[0]) is None, "the folder that is filled"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("longer", ["c4.en", "c4.beef", "c4.1", "c4.beef.1"])
def test_work_of_an_output_whose_name_begins_alike_stays(tmp_path: Path, longer: str) -> None:
    work = interrupted(tmp_path / longer, "0123456789abcdef")
    make(tmp_path / "c4")
    assert (work / "mark").read_text() == longer
    own = interrupted(tmp_path / "c4", "fedcba9876543210")
    make(tmp_path / "c4")
    assert not own.exists()
    assert (work / "mark").exists()


@pytest.mark.parametrize("longer", ["c4.en", "c4.beef", "c4.1"])
def test_what_replaces_an_output_whose_name_begins_alike_stays(
    tmp_path: Path, longer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two names that take turns where folders cannot be exchanged: it has neither of them."""
    output = tmp_path / longer
    make(output)
    moved = disk.move

    def die(source: Path, target: Path) -> None:
        if target == output:
            raise KeyboardInterrupt
        moved(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patched.setattr(disk, "exchange", lambda *_: False)
        patched.setattr(disk, "move", die)
        make(output)
    assert not output.exists()
    restore(tmp_path / "c4")
    assert not (tmp_path / "c4").exists()
    make(tmp_path / "c4")
    make(tmp_path / "c4")
    restore(output)
    assert (output / "mark").read_text() == f"new {longer}"


def test_two_runs_into_one_output_leave_each_other_alone(tmp_path: Path) -> None:
    with new_folder(tmp_path / "c", KIND) as first:
        (first / "mark").write_text("first")
        with new_folder(tmp_path / "c", KIND) as second:
            (second / "mark").write_text("second")
        assert (first / "mark").read_text() == "first"
        assert (tmp_path / "c" / "mark").read_text() == "second"
    assert (tmp_path / "c" / "mark").read_text() == "first"
    assert leftovers(tmp_path) == []


def test_work_whose_lock_is_another_users_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lock file can be opened for reading alone, and not be removed from a sticky folder."""
    others = tmp_path / ".c.beef.lock"

    def take_unless_theirs(path: Path, **options: bool) -> object:
        if path == others:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return take(path, **options)

    (tmp_path / ".c.beef.partial").mkdir()
    others.touch()
    monkeypatch.setattr(workspace, "take", take_unless_theirs)
    with resumed_folder(tmp_path / "c", KIND, "beef") as folder:
        assert folder.name != ".c.beef.partial"
        (folder / "mark").touch()
    assert (tmp_path / "c" / "mark").exists()
    assert others.exists()


def test_a_lock_file_that_cannot_be_removed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    lock = take(tmp_path / "lock")
    assert lock is not None
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        give_back(lock, tmp_path / "lock")
    assert take(tmp_path / "lock") is not None, "it is free"


@pytest.fixture(params=["disk", "nfs"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock as on a disk, or as NFS does: folders on each node alone, and files only if they are open for writing."""
    lock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, operation)

    if request.param == "nfs":
        monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("file_system")
def test_what_was_interrupted_is_gone_on_with_by_one_at_a_time(tmp_path: Path) -> None:
    def interrupted(error: BaseException) -> None:
        with resumed_folder(tmp_path / "c", KIND, "beef") as folder:
            (folder / "work").touch()
            raise error

    with pytest.raises(KeyboardInterrupt):
        interrupted(KeyboardInterrupt())
    assert [path.name for path in leftovers(tmp_path)] == [".c.beef.partial"]
    with pytest.raises(RuntimeError, match="stop"), resumed_folder(tmp_path / "c", KIND, "beef") as first:  # noqa: PT012
        assert (first / "work").exists()
        with pytest.raises(OSError, match="again"), resumed_folder(tmp_path / "c", KIND, "beef") as second:  # noqa: PT012
            assert list(second.iterdir()) == []
            raise OSError("again")
        assert leftovers(tmp_path) == [first, tmp_path / ".c.beef.lock"]
        raise RuntimeError("stop")
    with pytest.raises(OSError, match="broken"):
        interrupted(OSError("broken"))
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(ValueError, match="wrong"):
        interrupted(ValueError("wrong"))
    assert leftovers(tmp_path) == []


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is gone on with; what might be another process's is left alone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = interrupted(tmp_path / "c", "beef")
    others = interrupted(tmp_path / "c", "f00d")
    with resumed_folder(tmp_path / "c", KIND, "beef") as folder:
        assert (folder / "mark").exists()
    assert folder == left
    assert (tmp_path / "c" / "mark").exists()
    assert others.exists()


def test_where_nothing_can_be_written_the_output_is_named_and_no_hidden_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--output .*/file/corpus: .*/file is not a folder; move it away"):
        new_folder(tmp_path / "file" / "corpus", KIND).__enter__()


@pytest.mark.parametrize("output", [".", "inner/.."])
def test_an_output_without_a_name_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (tmp_path / "c" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "c")
    with pytest.raises(ValueError, match=rf"^--output {output}: ends without a name; write it out: /.*/c$"):
        new_folder(Path(output), KIND).__enter__()
    assert [path.name for path in (tmp_path / "c").rglob("*")] == ["inner"]
