"""Rename, exchange and flush files and folders, and name a disk that is full."""

import contextlib
import ctypes
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers for a full disk or quota."""
AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)
"""Error numbers of a shared file system while its server or this node's client restarts."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Return whether there is a file or a folder of this name, or what a link of this name leads to.

    From Python 3.14 on, `Path.exists`, `is_file` and `is_dir` take what cannot be reached for missing.

    Raises:
        OSError: it cannot be told, as while a disk is away.
    """
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """Return whether there is a file of this name, or a link that leads to one; see `is_there`.

    Raises:
        OSError: it cannot be told.
    """
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a name with a null character
        return None


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder, replacing a file or an empty folder, and flush the name to disk.

    Over NFS, a successful rename can be reported as "no such file": the server's reply was lost, and the client asked
    again. What has the final name tells which it was.

    Raises:
        OSError: it still has its old name, or did not exist.
    """
    moved = source.lstat()
    try:
        source.replace(target)
    except FileNotFoundError:
        if os.path.lexists(source) or not (os.path.lexists(target) and os.path.samestat(moved, target.lstat())):
            raise
    sync(target.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the kernel or the file system cannot.

    Raises:
        OSError: it failed, and both keep their names.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one.absolute()), AT_FDCWD, os.fsencode(other.absolute()), RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise OSError(number, os.strerror(number), str(other))
    return True


def look_again(folder: Path) -> None:
    """Make and remove a file in a folder, so that NFS asks its server which names are there now.

    It remembers for up to a minute which names it has not found, and locks do not make it ask again.
    """
    tempfile.NamedTemporaryFile(dir=folder).close()


def replace_folder(output: Path, new: Path, aside: Path) -> Path:
    """Put a folder in the place of another, flush the names, and return where the other one is now: `new` or `aside`.

    If the file system cannot exchange two names (NFS), this takes two renames, and a kill between them leaves none of
    the two at `output`.

    Args:
        output: the folder that is replaced.
        new: the folder that takes its place.
        aside: where the replaced one goes if names cannot be exchanged.

    Raises:
        OSError: it failed, and both keep their names.
    """
    if exchange(new, output):
        sync(output.parent)
        return new
    move(output, aside)
    try:
        move(new, output)
    except OSError:
        move(aside, output)
        raise
    return aside


class FullDiskError(OSError):
    """Name the folder for which the disk had no room, and the remedy."""


@contextlib.contextmanager
def naming_full_disk(output: Path | str, remedy: str) -> Iterator[None]:
    """Turn any error that a full disk causes while a folder is written into a FullDiskError.

    Raises:
        FullDiskError: the disk is full; names the folder and the remedy.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, FullDiskError) and number_of(error) not in FULL:
            raise
        raise FullDiskError(
            f"{output}: no space left on the device; nothing was kept. Free some space, or {remedy}"
        ) from error


def number_of(error: Exception) -> int | None:
    """Return the OS error number; Rust libraries and `shutil.copytree` only have it in the text of their errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    return int(found[1] or found[2]) if found else None
