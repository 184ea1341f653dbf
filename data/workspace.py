"""A folder that appears whole or not at all: filled under a hidden name, synced to disk, then renamed."""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder beside `output`; on a clean exit it replaces `output`, on an error it is removed.

    What a killed process left behind is removed by the next one that makes the same output: the lock that marks a
    folder as being filled ends with the process that holds it.

    Raises:
        OSError: no space is left on the device.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(output)
    folder = output.parent / f".{output.name}.{uuid.uuid4().hex[:8]}.partial"
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
        _publish(folder, output)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"{output}: no space left on the device; nothing was kept. Free some space, or choose another --output"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _publish(folder: Path, output: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)
    replaced = folder.with_suffix(".replaced")
    if output.exists():
        output.rename(replaced)
    folder.rename(output)
    sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(output: Path) -> None:
    for folder in output.parent.glob(f".{output.name}.*.partial"):
        descriptor = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):  # locked: another process is filling it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        os.close(descriptor)
