"""Write a snapshot to disk: the second half of a save. Ranks do not communicate here.

Every rank writes its files into the same hidden staging folder; then one of them publishes the folder.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from plumbline.data.disk import move, replace_folder, sync
from plumbline.launcher.runtime.checkpoint.store import (
    CONFIG,
    FORMAT,
    MANIFEST,
    POINTER,
    FileFacts,
    FormatError,
    Heartbeat,
    UnreadError,
    checkpoints,
    manifest_checksum,
    problems,
    silent,
    step_folder,
    step_of,
)
from plumbline.launcher.runtime.checkpoint.weights import TensorFile
from plumbline.launcher.runtime.config.sections import CheckpointConfig
from plumbline.launcher.runtime.system.files import remove_leftovers, write_whole
from plumbline.launcher.runtime.system.log import LOG

LEFTOVERS = ".step_*.staging"
"""Pattern of the staging folders that killed saves leave among the checkpoints."""
REPLACED = ".replaced"
"""Suffix of the hidden name of a checkpoint that is being replaced."""
SYNC_BYTES = 2**30
"""Bytes of a file between two syncs to disk, so that progress on a slow disk is noticed."""

DAMAGED: dict[tuple[Path, int], bool] = {}
"""(folder, modification time of its manifest) -> whether that checkpoint is damaged, of those that were looked at."""


def staging_folder(root: Path, step: int) -> Path:
    """Return a new name for the folder in which the checkpoint after `step` steps is written; one rank chooses it.

    The name is new each time: the lock of a run is released when its rank 0 ends, but another rank of an earlier
    attempt may still be alive and writing, and must not write into a folder of this attempt.
    """
    return root / f".{step_folder(root, step).name}.{uuid.uuid4().hex[:8]}.staging"


def make_room(staging: Path) -> None:
    """Create an empty staging folder; remove those of killed saves.

    Raises:
        OSError: the folder of the run is gone. To make it anew would leave two halves of a run that was moved.
    """
    remove_staging_folders(staging.parent)
    staging.parent.mkdir(exist_ok=True)
    staging.mkdir()


def tidy(root: Path, newest: Path) -> None:
    """Clean up before training resumes: remove staging folders, and correct an outdated `latest` pointer.

    What the resume passed over is damaged, and is not kept in the place of a whole one (`prune`).

    Args:
        root: the folder of the checkpoints; no other process may be writing to it.
        newest: the checkpoint from which training resumes, which may be in another folder.
    """
    remove_staging_folders(root)
    DAMAGED.update((_key(folder), True) for folder in checkpoints(root) if _is_passed_over(folder, newest))
    pointer = root / POINTER
    if newest.parent != root:
        return
    if not pointer.is_file() or pointer.read_bytes().strip() != newest.name.encode():  # a damaged one may hold no text
        _point_to(newest)


def remove_staging_folders(root: Path) -> None:
    """Delete what killed saves left among the checkpoints. No process may be writing there."""
    put_back(root)
    for leftover in root.glob(LEFTOVERS):
        shutil.rmtree(leftover, ignore_errors=True)
    remove_leftovers(root / POINTER)


def bytes_of_leftovers(root: Path) -> int:
    """Return the bytes that `remove_staging_folders` would free."""
    total = 0
    with suppress(OSError):  # another start may be deleting them
        for file in root.glob(f"{LEFTOVERS}/**/*"):
            total += file.stat().st_size if file.is_file() else 0
    return total


def write_files(files: Mapping[str, TensorFile | str], folder: Path, heartbeat: Heartbeat) -> dict[str, FileFacts]:
    """Write one rank's files of a snapshot to disk, and return the size and checksum of each.

    Args:
        files: path in the folder -> content.
        folder: the folder to write to.
        heartbeat: called for each part of a file that was synced to disk.

    Raises:
        OSError: a file could not be written.
    """
    facts = {}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        facts[name] = _write_file(folder / name, content, heartbeat)
    for parent in {(folder / name).parent for name in files}:
        sync(parent)  # the names in it
    return facts


def publish(staging: Path, facts: Mapping[str, Any], files: Mapping[str, FileFacts]) -> Path:
    """Turn a staging folder into a checkpoint: write the manifest, and rename the folder to its final name.

    Args:
        staging: the folder, with the files of all ranks.
        facts: facts of the snapshot.
        files: what `write_files` returned on all ranks.
    """
    root = staging.parent
    final = step_folder(root, facts["step"])
    manifest = {"format": FORMAT, **facts, "config_hash": files[CONFIG]["xxh3"], "files": dict(sorted(files.items()))}
    text = json.dumps({**manifest, "checksum": manifest_checksum(manifest)}, indent=2) + "\n"
    _write_file(staging / MANIFEST, text, silent)
    sync(staging)
    if final.exists():  # it is damaged, or this save is a second try
        replaced = replace_folder(final, staging, staging.with_suffix(REPLACED))
        shutil.rmtree(replaced, ignore_errors=True)  # only now that the new one has the name
    else:
        move(staging, final)
    _point_to(final)
    return final


def put_back(root: Path) -> None:
    """Restore the name of a checkpoint whose replacement was killed halfway. No process may be writing there."""
    for replaced in root.glob(f".step_*{REPLACED}"):
        final = root / replaced.name.split(".")[1]
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            move(replaced, final)


def _point_to(newest: Path) -> None:
    """Write the `latest` pointer. Our code does not read it, so failing to write it does not fail a save."""
    try:
        write_whole(newest.parent / POINTER, newest.name + "\n")
    except OSError as error:
        LOG.warning(f"{newest.parent / POINTER} does not name {newest.name} ({error}); the next save tries again")


def prune(root: Path, step: int, keep: CheckpointConfig, heartbeat: Heartbeat) -> None:
    """Delete checkpoints that need not be kept, now that the one of `step` has been published.

    Of the checkpoints up to `step`, the newest keep_last and the multiples of keep_every are kept. Damaged ones that
    training passed over are deleted: they must neither be mistaken for its newest state nor be kept in the place of a
    whole one. An undamaged one of a later step was written by another process, and is kept.

    Failing to delete a checkpoint (on NFS, while one of its files is open) is not an error, because the new checkpoint
    is complete anyway; the next save tries again.

    Args:
        root: the folder of the checkpoints.
        step: step of the checkpoint that was published.
        keep: which checkpoints to keep.
        heartbeat: called for each part of a later checkpoint that was read.
    """
    try:
        there = checkpoints(root)
    except OSError as error:
        LOG.warning(f"{root} cannot be listed ({error}); the next save deletes what need not be kept")
        return
    later = [folder for folder in there if step_of(folder) > step]
    ours = [folder for folder in there if step_of(folder) <= step]
    passed_over = [folder for folder in ours if DAMAGED.get(_key(folder))]
    older = [folder for folder in ours if folder not in passed_over][keep.keep_last :]
    unwanted = [folder for folder in older if keep.keep_every is None or step_of(folder) % keep.keep_every]
    unwanted += passed_over
    for folder in [*later, *unwanted]:
        try:
            if folder in unwanted or _is_damaged(folder, heartbeat):
                _remove(folder)
        except (OSError, UnreadError) as error:
            LOG.warning(f"{folder} cannot be deleted ({error}); the next save tries again")


def remove_after(root: Path, step: int) -> None:
    """Delete the checkpoints of steps after `step`, to which a run went back. No process may be writing there.

    Raises:
        OSError: a checkpoint cannot be deleted.
    """
    left = checkpoints(root)
    while left and step_of(left[0]) > step:
        _remove(left.pop(0))
    if left:
        tidy(root, left[0])
    else:
        (root / POINTER).unlink(missing_ok=True)


def _is_passed_over(folder: Path, newest: Path) -> bool:
    """Return whether a resume from `newest`, perhaps in another folder, has passed over a checkpoint as damaged."""
    return folder != newest and step_of(folder) >= step_of(newest)


def _key(folder: Path) -> tuple[Path, int]:
    """Return the key of a checkpoint in DAMAGED; its time is 0 without a manifest."""
    try:
        return folder, (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return folder, 0


def _is_damaged(folder: Path, heartbeat: Heartbeat) -> bool:
    """Return whether a checkpoint is damaged. Sizes are compared first; its contents are read at most once."""
    try:
        if problems(folder, first_alone=True):
            return True
        key = _key(folder)
        if key not in DAMAGED:
            DAMAGED[key] = bool(problems(folder, contents=True, heartbeat=heartbeat, first_alone=True))
        return DAMAGED[key]
    except FormatError:
        return False


def _remove(folder: Path) -> None:
    """Delete a checkpoint under a hidden name, so that a kill at any moment leaves no partial checkpoint."""
    hidden = staging_folder(folder.parent, step_of(folder))
    move(folder, hidden)
    shutil.rmtree(hidden)


def _write_file(path: Path, content: TensorFile | str, heartbeat: Heartbeat) -> FileFacts:
    """Write text or tensors to disk, and return size and checksum."""
    with path.open("wb") as file:
        sink = _HashedFile(file, heartbeat)
        if isinstance(content, str):
            sink.write(content.encode())
        else:
            content.write(sink)
        sink.sync()
    return sink.facts


class _HashedFile:
    """Write bytes to a file, and count and hash them on the way, so that they need not be read back."""

    def __init__(self, file: BinaryIO, heartbeat: Heartbeat) -> None:
        self._file, self._heartbeat, self._digest = file, heartbeat, xxhash.xxh3_64()
        self._size = self._synced = 0

    def write(self, data: Any, /) -> int:
        """Write the bytes of an object that has a buffer."""
        size = memoryview(data).nbytes
        self._digest.update(data)
        self._size += size
        self._file.write(data)
        if self._size - self._synced >= SYNC_BYTES:
            self.sync()
        return size

    def sync(self) -> None:
        """Sync what was written to disk; some file systems report only here that they are full."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = self._size
        self._heartbeat()

    @property
    def facts(self) -> FileFacts:
        """Return size and checksum of what was written, for the manifest."""
        return {"bytes": self._size, "xxh3": self._digest.hexdigest()}
