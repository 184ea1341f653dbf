"""Pretrain on ranks one of which has trouble with files; tests start it on two ranks.

    TROUBLE=late trouble.py --config FILE ...       arguments are those of pretrain.py
    TROUBLE=unread trouble.py --config FILE ...
    TROUBLE=unloaded trouble.py --config FILE ...

late: rank 1 takes LATE seconds to write its first checkpoint, and rank 0 as long to write samples.
unread: the disk of rank 1 fails when it verifies a checkpoint; unloaded: when it loads it.
"""

import errno
import os
import runpy
import time
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.checkpoint import commit, save, store
from plumbline.launcher.runtime.checkpoint.saved_tensors import SavedTensors
from plumbline.launcher.runtime.train import samples

LATE = 36.0
WRITE_FILES, WRITE_SAMPLES = commit.write_files, samples._write
CHECKSUM, READ = store._checksum, SavedTensors.read
OTHER = os.environ["RANK"] == "1"
waits = [LATE] if OTHER else []


def write_files(*arguments: Any) -> Any:
    """Write a rank's files, the first time late."""
    time.sleep(waits.pop() if waits else 0.0)
    return WRITE_FILES(*arguments)


def write_samples(*arguments: Any) -> None:
    """Write samples late."""
    time.sleep(LATE)
    WRITE_SAMPLES(*arguments)


def checksum(path: Path, *arguments: Any) -> str:
    """Read a file, which the disk refuses rank 1."""
    if OTHER:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return CHECKSUM(path, *arguments)


def read(*arguments: Any) -> Any:
    """Read a part of a tensor, which the disk refuses rank 1."""
    if OTHER:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return READ(*arguments)


if __name__ == "__main__":
    if os.environ["TROUBLE"] == "late":
        vars(save)["write_files"] = write_files
        vars(samples)["_write"] = write_samples
    elif os.environ["TROUBLE"] == "unread":
        vars(store)["_checksum"] = checksum
    else:
        setattr(SavedTensors, "read", read)  # noqa: B010 - a method, to mypy
    runpy.run_path(str(Path(__file__).parents[2] / "launcher" / "pretrain.py"), run_name="__main__")
