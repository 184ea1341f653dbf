"""Pretrain on ranks one of which has trouble with files or its device; tests start it on two ranks.

    TROUBLE=late trouble.py --config FILE ...       arguments are those of pretrain.py

late: rank 1 takes LATE seconds to write its first checkpoint, and rank 0 as long to write samples.
unread: the disk of rank 1 fails when it verifies a checkpoint; unloaded: when it loads it.
away: that of rank 0 fails when it takes the run's lock.
broken: rank 1 makes two steps, then its device reports that its memory is broken, as CUDA's errors do.
"""

import errno
import os
import runpy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.checkpoint import commit, publishing, store
from plumbline.launcher.runtime.checkpoint.saved_tensors import SavedTensors
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.run import status
from plumbline.launcher.runtime.train import samples

LATE = 36.0
WRITE_FILES, WRITE_SAMPLES = publishing.write_files, samples._write
CHECKSUM, READ = store._checksum, SavedTensors.read
OTHER = os.environ["RANK"] == "1"
TRAIN_STEP = Engine.train_step
waits = [LATE] if OTHER else []
steps: list[None] = []


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


@contextmanager
def hold(folder: Path, *_: Any) -> Iterator[None]:
    """Hold the lock of a run, which the disk refuses rank 0."""
    if not OTHER:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder / "lock"))
    yield


def train_step(*arguments: Any) -> Any:
    """Make a step; rank 1 makes no third one."""
    if OTHER:
        steps.append(None)
        if len(steps) > 2:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECC' in ...")
    return TRAIN_STEP(*arguments)


if __name__ == "__main__":
    if os.environ["TROUBLE"] == "late":
        vars(commit)["write_files"] = write_files
        vars(samples)["_write"] = write_samples
    elif os.environ["TROUBLE"] == "unread":
        vars(store)["_checksum"] = checksum
    elif os.environ["TROUBLE"] == "away":
        vars(status)["hold"] = hold
    elif os.environ["TROUBLE"] == "broken":
        setattr(Engine, "train_step", train_step)  # noqa: B010
    else:
        setattr(SavedTensors, "read", read)  # noqa: B010 - a method, to mypy
    runpy.run_path(str(Path(__file__).parents[2] / "launcher" / "pretrain.py"), run_name="__main__")
