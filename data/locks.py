"""Take locks of files, and ask who holds them, on file systems that have locks and on those that have none."""

import errno
import fcntl
from pathlib import Path
from typing import IO, Any

LOCKLESS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Numbers of the errors that say that a file system has no locks, as Lustre may be mounted."""


def is_held(descriptor: int, unknown: bool = True) -> bool:
    """Return whether another open file holds the lock; if not, this one does from now on, until it is closed.

    Args:
        descriptor: of an open file or folder.
        unknown: what to return where the file system has no locks.

    Raises:
        OSError: the lock cannot be asked for.
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


def wait_for(file: IO[Any], key: str, folder: Path) -> None:
    """Hold the lock of an open file from when nobody else does until it is closed.

    Args:
        file: open for writing.
        key: of the configuration, that decides where the file lies.
        folder: what the key stands at.

    Raises:
        OSError: the file system has no locks; it names the key, and says what to do.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
        remedy = "choose a folder on another file system, such as a disk of each node"
        raise OSError(f"{key} = {folder}: files there cannot be locked ({error.strerror}); {remedy}") from error
