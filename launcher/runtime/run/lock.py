"""Allow one launch at a time for each run folder, whichever launcher starts it.

The lock is a POSIX record lock on the file `lock` of the run folder: it works over NFS, and the kernel or the NFS
server releases it when its holder dies, except that an NFS 3 server may not while the holder's host is down, see
`hold`. The file names the holder, and stays when nobody holds the lock.

A process must not open the file again while it holds the lock: closing any descriptor of it would release the lock.
Nothing here imports torch.
"""

import errno
import fcntl
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from plumbline.data.disk import is_there
from plumbline.launcher.runtime.cluster.launch import job_id, restart_count
from plumbline.launcher.runtime.system.log import LOG

LOCK = "lock"
FLOCK = "hhqqi"  # struct flock of Linux on 64 bits: type, whence, start, length, process
LEASE_SECONDS = 120.0  # how long a requeued job waits for its own lock, which an NFS server keeps for a dead node


class RunLockedError(ValueError):
    """Signal that another process trains in a run folder; `passes` if it is an earlier attempt of the same job."""

    def __init__(self, message: str, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


@contextmanager
def hold(folder: Path, patience: float = 0.0, pulse: Path | None = None) -> Iterator[Callable[[], bool]]:
    """Hold the lock of a run folder, which is created if necessary; other processes are refused meanwhile.

    If the file system has no locks, this warns and goes on. Yields a function that returns whether the lock is still
    ours: a later attempt may have replaced it while this host was cut off.

    Args:
        folder: the run folder.
        patience: seconds to wait for a holder that is an earlier attempt of this process's Slurm job.
        pulse: a file that a living holder writes regularly. If an earlier attempt has not written it for `patience`,
            its lock is replaced: over NFS 3 the lock of a dead node stays until the node is back.

    Raises:
        RunLockedError: another process holds the lock; names its host, process and Slurm job.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        descriptor = _acquire(descriptor, folder, patience, pulse)
        facts = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slurm_job_id": job_id(),
            "slurm_restart_count": restart_count(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode() + b"\n", 0)
        os.fsync(descriptor)
        mine = os.fstat(descriptor)

        def is_ours() -> bool:
            with suppress(OSError):  # removed, or unavailable for a moment
                return os.path.samestat(mine, (folder / LOCK).stat())
            return True

        yield is_ours
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, patience: float, pulse: Path | None) -> int:
    """Lock the file, or a replacement of it, and return the descriptor; raises RunLockedError if it is held."""
    deadline = time.monotonic() + patience
    before = _last_write(pulse)
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                LOG.warning(f"{folder / LOCK} cannot be locked ({error}): see to it that nobody else trains this run")
                return descriptor
        owner = _read_owner(descriptor)
        is_before = _is_before(owner)
        if not is_before or time.monotonic() > deadline:
            if is_before and before is not None and _last_write(pulse) == before:
                LOG.warning(
                    f"{folder / LOCK}: an earlier attempt of this job, on {owner.get('host', '?')}, has not given it "
                    f"back, and nothing of it has moved for {patience:g} s: going on without it"
                )
                new = _in_its_place(folder)
                os.close(descriptor)
                return new
            raise RunLockedError(refusal(folder, owner), passes=is_before)
        time.sleep(1.0)


def refusal(folder: Path, owner: Mapping[str, Any]) -> str:
    """Describe who trains in a run folder, and what to do."""
    job = owner.get("slurm_job_id")
    return (
        f"{folder} is being trained by process {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"
        f"{'' if job is None else f', Slurm job {job}'}, since {owner.get('since', 'just now')}: stop that one, or "
        f"give this run another run.name (only if that host is gone for good, remove {folder / LOCK})"
    )


def _is_before(owner: Mapping[str, Any]) -> bool:
    """Return whether the holder is an earlier attempt of the Slurm job of this process, which Slurm has ended."""
    theirs, mine = owner.get("slurm_restart_count"), restart_count()
    return owner.get("slurm_job_id") == job_id() and mine is not None and theirs is not None and theirs < mine


def _last_write(pulse: Path | None) -> float | None:
    """Return when the file was last written, by the clock of its file system, or None if there is no file."""
    return pulse.stat().st_mtime if pulse is not None and is_there(pulse) else None


def _in_its_place(folder: Path) -> int:
    """Lock a new file, replace the old one by it, and return its descriptor."""
    new = folder / f".{LOCK}.{uuid.uuid4().hex[:8]}"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.lockf(descriptor, fcntl.LOCK_EX)  # nobody else has opened it yet
    new.replace(folder / LOCK)
    return descriptor


def owner_of(folder: Path) -> dict[str, Any] | None:
    """Return what the holder of a run's lock wrote about itself, without taking the lock, or None if nobody holds it.

    Holders on this machine are always found; those on others over NFS, but not on every file system.

    Raises:
        OSError: the file system has no locks, or this user may not read the file.
    """
    if not is_there(folder / LOCK):
        return None
    descriptor = os.open(folder / LOCK, os.O_RDONLY)
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
        return None if kind == fcntl.F_UNLCK else _read_owner(descriptor)
    finally:
        os.close(descriptor)


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Return what the holder wrote about itself, which is empty before it has written."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
