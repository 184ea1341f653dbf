"""Publish a folder atomically: fill it under a hidden name, sync it to disk, then rename it.

A folder that already has the final name is replaced only if it is empty or of the same kind.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from plumbline.data import disk
from plumbline.data.disk import FullDiskError, naming_full_disk, sync
from plumbline.data.locks import give_back, take

PARTIAL, NEW, OLD = ".partial", ".new", ".old"
"""Suffixes of hidden folders: one being filled, a finished one about to replace the output, and the old output if the
two cannot be exchanged."""
LOCK = ".lock"
"""Suffix of the hidden file that a process keeps locked until its folder has the final name or is gone."""

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Error numbers for a folder that cannot be written to: no permission, read-only, or not a folder."""


@dataclass(frozen=True)
class FolderKind:
    """Distinguish one kind of published folder from a user's own files."""

    name: str
    """Name with its article, used in messages."""
    marks: tuple[str, ...]
    """Patterns of paths within the folder; every folder of this kind has a match for each."""
    others: tuple[str, ...]
    """Patterns of all other files that may be in it."""

    def owns(self, file: Path) -> bool:
        """Return whether a folder of this kind may contain the given path."""
        return any(_matches(file, pattern) for pattern in (*self.marks, *self.others))


def is_free(output: Path) -> bool:
    """Return whether this path is missing or an empty folder, with nothing to `restore`."""
    restore(output)
    return not os.path.lexists(output) or (output.is_dir() and not output.is_symlink() and not any(output.iterdir()))


def check_folder(output: Path, folder: Path | None = None, option: str = "--output") -> None:
    """Refuse an output path whose folder (by default itself) is, or would be in, something else than a folder.

    Args:
        output: the path, as the option gave it.
        folder: the folder that has to be one, or free.
        option: the option that gave the path.

    Raises:
        ValueError: names the path, what is there, and what to do.
    """
    place = in_the_way_of(folder or output)
    if place is not None:
        raise ValueError(f"{option} {output}: {place} is not a folder; move it away, or choose another name")


def in_the_way_of(folder: Path) -> Path | None:
    """Return what lies where a folder, or one above it, is or would be, and is none; None if nothing does."""
    folder = folder.absolute()
    place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    return None if place.is_dir() else place


def check_replaceable(output: Path, kind: FolderKind) -> None:
    """Refuse an output path unless it is free, or a folder of `kind` without other files.

    Raises:
        ValueError: names the path, what is there, and what to do.
    """
    if output.name in ("", ".."):  # the hidden folders beside it are named after it
        raise ValueError(f"--output {output}: ends without a name; write it out: {output.resolve()}")
    check_folder(output, output.parent)
    if not is_free(output) and (obstacle := _foreign(output, kind)):
        raise ValueError(f"--output {output}: {obstacle}; nothing was replaced: choose another name, or move this away")


def _foreign(output: Path, kind: FolderKind) -> str | None:
    """Return why a path is not a folder of `kind`, or None if it is one."""
    if output.is_symlink():
        return "exists and is a link"
    if not output.is_dir():
        return "exists and is not a folder"
    files = sorted(path.relative_to(output) for path in output.rglob("*") if path.is_symlink() or not path.is_dir())
    for mark in kind.marks:
        if not any(_matches(file, mark) for file in files):
            return f"exists and is not {kind.name} (no {mark})"
    foreign = [str(file) for file in files if not kind.owns(file)]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        return f"holds more than {kind.name} ({', '.join(foreign[:3])}{more})"
    return None


def _matches(file: Path, pattern: str) -> bool:
    return len(file.parts) == len(Path(pattern).parts) and file.match(pattern)


def check_replaceable_file(output: Path, start: str) -> None:
    """Refuse to replace a file that does not begin with `start`, as our own files do.

    Raises:
        ValueError: names the path and what to do.
    """
    if not os.path.lexists(output):
        return
    expected = start.encode()
    if output.is_file():
        with output.open("rb") as file:
            if file.read(len(expected)) in (b"", expected):
                return
    raise ValueError(
        f"--output {output}: exists and was not written by this command; nothing was replaced: choose another name, "
        "or move this away"
    )


@contextlib.contextmanager
def new_folder(output: Path, kind: FolderKind) -> Iterator[Path]:
    """Yield an empty folder beside `output` that replaces `output` on a clean exit and is removed on an error.

    Whatever fails, the old output is still there.

    Leftovers of a killed process are removed by the next one that makes the same output: the lock that marks a folder
    as being filled ends with its process, on whichever node that was.

    Raises:
        ValueError: `output` may not be replaced (`check_replaceable`).
        FullDiskError: no space is left on the device.
    """
    with _filled(output, kind, None) as folder:
        yield folder


@contextlib.contextmanager
def resumed_folder(output: Path, kind: FolderKind, key: str) -> Iterator[Path]:
    """Yield a folder as `new_folder` does, but with the work that an interrupted process of the same key left in it.

    Errors that a repetition would not fix, a ValueError or a full disk, remove the folder; anything else that ends the
    process keeps it. If another process is filling the folder, a new one is yielded, which is never kept.

    Args:
        output: The name that the folder gets on a clean exit.
        kind: What it may replace.
        key: Hash, in hexadecimal digits, of everything on which the folder's contents depend.

    Raises:
        ValueError: `output` may not be replaced (`check_replaceable`).
        FullDiskError: no space is left on the device.
    """
    with _filled(output, kind, key) as folder:
        yield folder


@contextlib.contextmanager
def _filled(output: Path, kind: FolderKind, key: str | None) -> Iterator[Path]:
    check_replaceable(output, kind)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _clean(output)
        folder, lock = _own_folder(output, key)
    except OSError as error:
        if error.errno not in CLOSED:
            raise
        raise ValueError(
            f"--output {output}: nothing can be written there ({error.strerror}); choose another name"
        ) from error
    keep = False
    try:
        _remove_abandoned(output, folder)
        with naming_full_disk(output, "write to another disk"):
            yield folder
            check_replaceable(output, kind)  # again: filling may have taken hours
            publish_folder(folder, output)
    except (OSError, KeyboardInterrupt, SystemExit) as error:
        keep = not isinstance(error, FullDiskError)
        raise
    finally:
        if not (keep and key is not None and folder.name == _partial(output, key)):
            shutil.rmtree(folder, ignore_errors=True)
        give_back(lock, _lock_of(folder))


def _partial(output: Path, key: str) -> str:
    return f".{output.name}.{key}{PARTIAL}"


def _own_folder(output: Path, key: str | None) -> tuple[Path, IO[bytes]]:
    """Return a folder that no other process is filling, the key's own if it is free, and the lock that protects it.

    Without locks in the file system, we assume that nobody else is filling it.
    """
    while True:
        folder = output.parent / _partial(output, key or uuid.uuid4().hex[:8])
        try:
            lock = take(_lock_of(folder), unknown=False)
        except PermissionError:  # another user's, unless its name is new
            if key is None:
                raise
            lock = None
        if lock is None:
            key = None
            continue
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            give_back(lock, _lock_of(folder))
            raise
        return folder, lock


def _lock_of(folder: Path) -> Path:
    """Return the lock file of a hidden folder, the same for every name that the folder takes."""
    name = folder.name.removesuffix(PARTIAL)
    return folder.with_name((name if name != folder.name else name.rsplit(".", 2)[0]) + LOCK)


def publish_folder(folder: Path, output: Path) -> None:
    """Flush a filled folder to disk and move it to its final name, replacing what is there.

    Whenever the process is killed, either the old or the new folder has that name, or gets it from `restore`.

    Raises:
        OSError: it could not be moved; the old folder is back in place.
    """
    apply_umask(folder)
    for path in [*folder.rglob("*"), folder]:
        sync(path)
    if not output.exists():
        disk.move(folder, output)
        return
    # After a kill, the inode number tells whether the folder of this name is still the new one
    new = folder.with_suffix(f".{folder.stat().st_ino}{NEW}")
    disk.move(folder, new)
    try:
        old = disk.replace_folder(output, new, new.with_suffix(OLD))
    except OSError:
        disk.move(new, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def restore(output: Path) -> None:
    """Put back an output that a process moved away before it was killed."""
    for old in () if os.path.lexists(output) else _hidden(output, OLD):
        with _abandoned(old.with_suffix(NEW)) as abandoned:
            if abandoned and not os.path.lexists(output):
                with contextlib.suppress(OSError):  # another process does the same, or we may not write here
                    disk.move(old, output)


def _clean(output: Path) -> None:
    """Remove what processes left that were killed while replacing a folder; finished work can still be resumed."""
    restore(output)
    for old in _hidden(output, OLD) if os.path.lexists(output) else ():
        shutil.rmtree(old, ignore_errors=True)
    for new in _hidden(output, NEW):
        with _abandoned(new) as abandoned:
            name, number, _ = new.name.rsplit(".", 2)
            partial = new.with_name(name + PARTIAL)
            if abandoned and new.stat().st_ino == int(number) and not partial.exists():
                disk.move(new, partial)
            elif abandoned:
                shutil.rmtree(new, ignore_errors=True)


def _hidden(output: Path, ending: str) -> list[Path]:
    """Return the hidden folders, or lock files, beside an output that are named after it and have this ending.

    The name of another output may begin with this one's and a dot.
    """
    number = r"\.\d+" if ending in (NEW, OLD) else ""
    name = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]+{number}{re.escape(ending)}")
    folders = output.parent.glob(f".*{ending}")  # a glob cannot exclude further dots
    return [folder for folder in folders if name.fullmatch(folder.name)]


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Yield whether a folder exists and no process is filling or publishing it, and keep it so meanwhile."""
    path = _lock_of(folder)
    try:
        lock = take(path)
    except OSError:  # we may not write here, or not to another user's lock
        lock = None
    if lock is None:
        yield False
        return
    try:
        yield folder.is_dir()
    finally:
        give_back(lock, path)


def apply_umask(folder: Path) -> None:
    """Give everything in a folder the permissions that the umask allows, since safetensors makes files of mode 0600.

    Permissions are only added: a default access control list of the folder may have granted more. Files that another
    folder has as well, by a hard link, keep those that their owner gave them.
    """
    allowed = 0o777 & ~_umask()
    for path in [folder, *folder.rglob("*")]:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode) or (stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1):
            continue
        mode = stat.S_IMODE(facts.st_mode)
        wanted = mode | (allowed if path.is_dir() else allowed & 0o666)
        if wanted != mode:
            with contextlib.suppress(PermissionError):  # a file system without permissions, or another user's file
                path.chmod(wanted)


def _umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _remove_abandoned(output: Path, own: Path) -> None:
    locked = {lock.with_suffix(PARTIAL) for lock in _hidden(output, LOCK)}
    for folder in {*_hidden(output, PARTIAL), *locked} - {own}:
        with _abandoned(folder) as abandoned:  # which removes its lock
            if abandoned:
                shutil.rmtree(folder, ignore_errors=True)  # it may be another user's
