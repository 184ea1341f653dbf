"""Take and query file locks, on file systems with and without locks."""

import errno
import fcntl
from pathlib import Path
from typing import IO, Any

LOCKLESS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of file systems without locks; Lustre can be mounted that way."""


def is_held(descriptor: int, unknown: bool = True) -> bool:
    """Return whether another open file holds the lock; if not, take it until this file is closed.

    Args:
        descriptor: of an open file or folder.
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
