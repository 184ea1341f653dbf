"""Take and query locks of files, on file systems with and without locks.

Folders are not locked, because NFS and Lustre keep such a lock to the node that took it, and report no error.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LOCKLESS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of file systems without locks; Lustre can be mounted that way."""


def is_held(descriptor: int, unknown: bool = True) -> bool:
    """Return whether another open file holds the lock; if not, take it until this file is closed.

    Args:
        descriptor: of a file that is open for writing, as NFS requires.
        unknown: what to return if the file system has no locks.

    Raises:
        OSError: locking failed for another reason.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
        return unknown
    return False


def take(path: Path, unknown: bool = True) -> IO[bytes] | None:
    """Return a lock file, made if it is missing and locked until `give_back`, or None if another process holds it.

    Args:
        path: the file.
        unknown: see `is_held`.

    Raises:
        OSError: it cannot be made, or not be opened for writing.
    """
    while True:
        file = path.open("ab")
        if is_held(file.fileno(), unknown):
            file.close()
            return None
        if same_file(file.fileno(), path):
            return file
        file.close()  # removed by the process that held it, before this one locked it


def give_back(file: IO[bytes], path: Path) -> None:
    """Remove a lock file and release its lock."""
    with suppress(OSError):  # another user's, or the disk is away: the next process takes it as it is
        path.unlink()
    file.close()


def same_file(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def wait_for(file: IO[Any], key: str, folder: Path) -> None:
    """Wait for the lock of an open file, and hold it until the file is closed.

    Args:
        file: open for writing.
        key: the configuration key that decides where the file lies.
        folder: the value of that key.

    Raises:
        OSError: the file system has no locks; the message names the key and the remedy.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
        remedy = "choose a folder on another file system, such as a disk of each node"
        raise OSError(f"{key} = {folder}: files there cannot be locked ({error.strerror}); {remedy}") from error
