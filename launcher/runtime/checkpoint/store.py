"""Read and verify checkpoints, which are written atomically.

In a save, every rank writes its own files into a hidden staging folder. The manifest (size and checksum of each file)
is written last, then the folder is renamed to its final name and the `latest` pointer replaced. So a folder with its
final name was written completely, even if a process was killed at any moment. Readers verify a checkpoint first, and
use the newest one that is whole, that is, without missing or damaged files.

    checkpoints/latest                      text: the name of the newest checkpoint, for people and scripts
    checkpoints/step_00001000/state/        a file for each rank: its part of weights, optimizer states, moving average
                              config.yaml   the resolved configuration
                              state.json    training state: step, samples, tokens, skipped data, guards
                              manifest.json every other file with size and checksum
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from plumbline.data.damage import DamagedFileError, read_object
from plumbline.data.disk import is_file
from plumbline.data.paths import leads_out
from plumbline.data.skipped import NOTHING, SkippedData
from plumbline.launcher.runtime.config import run_files
from plumbline.launcher.runtime.system.files import read_key
from plumbline.launcher.runtime.system.log import LOG

Heartbeat = Callable[[], object]
"""Is called for each part of what takes long, such as reading a checkpoint: whoever watches knows that it goes on."""

FORMAT = 2
BLOCK = 2**24
"""Bytes of a file that are read at once."""
MANIFEST, STATE, POINTER = "manifest.json", "state.json", "latest"
CONFIG = run_files.CONFIG


class CheckpointError(ValueError):
    """Refuse a checkpoint that cannot be used, or a resume that would contradict it."""


class UnsavedError(CheckpointError):
    """Signal that a checkpoint, or a file that the run depends on, could not be written."""


def silent() -> None:
    """Do nothing: the heartbeat of what nobody watches."""


@contextmanager
def ending_if_unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError into an UnsavedError, which tells the user to free space and to start again.

    Raises:
        UnsavedError: the file could not be written.
    """
    try:
        yield
    except OSError as error:
        raise UnsavedError(
            f"{path} could not be written ({error}): free some space there and start the same command again"
        ) from error


class UnreadError(CheckpointError):
    """Signal that a run's checkpoints could not be read, perhaps only for a while."""


@contextmanager
def ending_if_unreadable(source: Path | str) -> Iterator[None]:
    """Turn an OSError into an UnreadError, which tells the user what to do.

    Raises:
        UnreadError: the source could not be read.
    """
    try:
        yield
    except OSError as error:
        raise UnreadError(
            f"{source} could not be read ({error}): look at its file system, and start the same command again; if it "
            "stays so, move away what cannot be read, to go on from an earlier checkpoint"
        ) from error


class BrokenWeightsError(CheckpointError):
    """Refuse to save weights that are not finite, since they would replace a usable checkpoint."""


class FormatError(CheckpointError):
    """Refuse a whole checkpoint of another version; to skip it like a damaged one would discard finished training."""


class FileFacts(TypedDict):
    """Describe a file of a checkpoint, as its manifest does."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class TrainState:
    """Hold the training state, which with the configuration determines the data order, the schedule and dropout."""

    step: int
    """Completed optimizer steps."""
    samples: int
    """Sequences consumed. Together with the skipped ones, the position in the global data order."""
    tokens: int
    """Tokens consumed."""
    corpora: dict[str, str]
    """Name -> fingerprint of all sources that the run reads from here on, in their order."""
    skipped: SkippedData = NOTHING
    """Data that the run skips, after it went back to a checkpoint."""
    guards: dict[str, Any] = field(default_factory=dict)
    """Name of a guard -> its state, as JSON values."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the part of the state that is also in the manifest."""
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens, "corpora": self.corpora}

    def to_json(self) -> dict[str, Any]:
        """Return the object of state.json."""
        return {**self.facts, "skipped": self.skipped.ranges, "guards": self.guards}

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> "TrainState":
        """Return the state from an object of state.json; older checkpoints have neither skipped data nor guards.

        Raises:
            ValueError: the object holds something else.
        """
        guards = item.get("guards", {})
        if not isinstance(guards, dict):
            raise ValueError(f"guards = {guards!r}: expected an object with the name of each guard")
        return cls(**{**item, "skipped": SkippedData.from_json(item.get("skipped", []))})


def step_folder(root: Path, step: int) -> Path:
    """Return the final folder of the checkpoint after `step` steps."""
    return root / f"step_{step:08d}"


def checkpoints(root: Path) -> list[Path]:
    """Return all published checkpoints, newest first; they may have been damaged since.

    Raises:
        OSError: the folder exists and cannot be listed. `Path.glob` would find nothing in it, without an error.
    """
    try:
        return sorted(filter(_has_step, root.iterdir()), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has_step(folder: Path) -> bool:
    return folder.name.startswith("step_") and folder.name[5:].isdigit()


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was saved: that of its name, or of its manifest if it was renamed."""
    return int(folder.name[5:]) if _has_step(folder) else int(read_manifest(folder)["step"])


def newest_whole(folders: Iterable[Path], check: Callable[[Path], list[str]], warn: bool = True) -> Path | None:
    """Return the first checkpoint in which `check` finds no problem, or None.

    Args:
        folders: candidates, newest first, as `checkpoints` lists them.
        check: returns the problems of a checkpoint, as `problems` does, as thoroughly as the caller needs.
        warn: log a warning for each checkpoint that is skipped.
    """
    for folder in folders:
        found = check(folder)
        if not found:
            return folder
        if warn:
            LOG.warning(f"{folder} cannot be used and is passed over: {'; '.join(found[:3])}")
    return None


def problems(
    folder: Path,
    contents: bool = False,
    only: Callable[[str], bool] = lambda _name: True,
    share: slice = slice(None),
    heartbeat: Heartbeat = silent,
    first_alone: bool = False,
) -> list[str]:
    """Return the problems of a checkpoint: missing or damaged files, or a damaged manifest.

    Args:
        folder: the checkpoint.
        contents: whether to compare the checksums of all files, which reads them. Otherwise only sizes are compared,
            and the checksum of config.yaml, which every user of a checkpoint reads.
        only: returns whether to check a file, by its name.
        share: which of these files to check, in the order of their names, so that ranks can divide the work.
        heartbeat: called for each part of a file that was read.
        first_alone: return only the first problem.

    Raises:
        FormatError: the checkpoint is whole but has another format version.
        UnreadError: the manifest could not be read.
        OSError: another file could not be read.
    """
    try:
        manifest = read_manifest(folder)
    except (FormatError, UnreadError):  # the checkpoint must not be skipped
        raise
    except CheckpointError as error:
        return [str(error)]
    if _has_step(folder) and manifest["step"] != step_of(folder):
        return [f"{MANIFEST} is of step {manifest['step']}"]
    files = manifest["files"]
    found = (
        problem
        for name in sorted(filter(only, files))[share]
        if (problem := _problem(folder, name, files[name], contents or name == CONFIG, heartbeat))
    )
    return list(islice(found, 1 if first_alone else None))


def _problem(folder: Path, name: str, expected: FileFacts, contents: bool, heartbeat: Heartbeat) -> str | None:
    """Return what is wrong with one file of a checkpoint, given its size and checksum in the manifest, or None."""
    path = folder / name
    if not is_file(path):
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
    if contents and _checksum(path, heartbeat) != expected["xxh3"]:
        return f"{name} has another checksum than when it was written"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing, damaged or of another format version (FormatError), or could not be
            read (UnreadError).
    """
    with ending_if_unreadable(folder / MANIFEST):
        try:
            manifest = read_object(folder / MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is missing") from error
        except (IsADirectoryError, DamagedFileError) as error:
            raise CheckpointError(str(error)) from error
    if manifest.pop("checksum", None) != manifest_checksum(manifest):
        raise CheckpointError(f"{folder / MANIFEST} has another checksum than when it was written")
    if manifest.get("format") != FORMAT:
        raise FormatError(f"{folder}: checkpoint format {manifest.get('format')}, this version reads {FORMAT}")
    _check_manifest(manifest, folder / MANIFEST)
    return manifest


def _check_manifest(manifest: dict[str, Any], path: Path) -> None:
    """Refuse a manifest without step or files, with a value of another type, or with a file outside of its folder.

    The checksum only shows that the manifest is unchanged since it was written, not that our code wrote it.
    """
    try:
        read_key(manifest, "step", int, path)
        for key, least in (("step", 0), ("samples", 0), ("tokens", 0), ("world_size", 1), ("zero_stage", 0)):
            if key in manifest and read_key(manifest, key, int, path) < least:
                raise DamagedFileError(f"{path}: {key} = {manifest[key]}: less than {least}")
        read_key({"corpora": {}, **manifest}, "corpora", dict, path)
        for name, facts in read_key(manifest, "files", dict, path).items():
            if leads_out(name):
                raise DamagedFileError(f"{path}: files: {name}: not a file of this folder")
            if not isinstance(facts, dict):
                raise DamagedFileError(f"{path}: files: {name} = {facts!r}: expected bytes and xxh3")
            read_key(facts, "bytes", int, path)
            read_key(facts, "xxh3", str, path)
    except DamagedFileError as error:
        raise CheckpointError(str(error)) from error


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return the checksum of all entries of a manifest except the checksum itself."""
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _checksum(path: Path, heartbeat: Heartbeat) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            heartbeat()
    return digest.hexdigest()
