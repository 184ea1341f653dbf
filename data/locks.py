"""Ask whether another process holds a lock, on file systems that have locks and on those that have none."""

import errno
import fcntl

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
