"""Keep checkpoints that exist whole or not at all.

A save writes into a hidden staging folder, every rank its own files; the manifest (each file with size and checksum) is
written last, then the folder is renamed to its final name and the `latest` pointer replaced. So a folder with its final
name is complete, whatever was killed when. Whoever reads one verifies it first, and takes the newest that is whole.

    checkpoints/latest                      text: the name of the newest checkpoint, for people and scripts
    checkpoints/step_00001000/state/        a file for each rank: its part of weights, optimizer states, moving average
                              config.yaml   the resolved configuration
                              state.json    where training stood: step, samples, tokens, data that is left out; guards
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

from plumbline.data.damage import DamagedFileError
from plumbline.data.paths import leads_out
from plumbline.data.skipped import NOTHING, SkippedData
from plumbline.launcher.runtime.system.files import read_key, read_object
from plumbline.launcher.runtime.system.log import LOG

FORMAT = 2
BLOCK = 2**24
"""Bytes of a file that are read at once."""
MANIFEST, STATE, CONFIG, POINTER = "manifest.json", "state.json", "config.yaml", "latest"


class CheckpointError(ValueError):
    """Refuse a checkpoint that cannot be used, or a resume that would contradict it."""


class UnsavedError(CheckpointError):
    """Signal that a checkpoint, or a file that the run depends on, could not be written."""


@contextmanager
def ending_if_unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError into an UnsavedError, which tells the user to free space and to start again.

    Raises:
        UnsavedError: the system refused it.
    """
    try:
        yield
    except OSError as error:
        raise UnsavedError(
            f"{path} could not be written ({error}): free some space there and start the same command again"
        ) from error


class UnreadError(CheckpointError):
    """Signal that a run's checkpoints could not be read, which may be different in a while."""


@contextmanager
def ending_if_unreadable(source: Path | str) -> Iterator[None]:
    """Turn an OSError into an UnreadError, which tells the user what to do.

    Raises:
        UnreadError: the system refused it.
    """
    try:
        yield
    except OSError as error:
        raise UnreadError(
            f"{source} could not be read ({error}): look at its file system, and start the same command again; if it "
            "stays so, move away what cannot be read, to go on from an earlier checkpoint"
        ) from error


class BrokenWeightsError(CheckpointError):
    """Refuse weights that are not finite: saved, they would take the place of a checkpoint that is of use."""


class FormatError(CheckpointError):
    """Refuse a whole checkpoint of another version: passed over as damaged, it would be overtaken by training."""


class FileFacts(TypedDict):
    """Describe a file of a checkpoint, as its manifest does."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class TrainState:
    """Say where training stands. The data order, the schedule and dropout are functions of it and the configuration."""

    step: int
    """Completed optimizer steps."""
    samples: int
    """Sequences consumed. With those that were left out before, the position in the global data order."""
    tokens: int
    """Tokens consumed."""
    corpora: dict[str, str]
    """Path -> fingerprint of the corpora that the position counts in."""
    skipped: SkippedData = NOTHING
    """Data that is left out, once a run went back to before it."""
    guards: dict[str, Any] = field(default_factory=dict)
    """Name of a guard -> what it remembers, as JSON has it."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the manifest says as well."""
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens, "corpora": self.corpora}

    def to_json(self) -> dict[str, Any]:
        """Return the object of state.json."""
        return {**self.facts, "skipped": self.skipped.windows, "guards": self.guards}

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> "TrainState":
        """Return the state of an object of state.json; checkpoints of before have neither skipped data nor guards.

        Raises:
            ValueError: it holds something else.
        """
        guards = item.get("guards", {})
        if not isinstance(guards, dict):
            raise ValueError(f"guards = {guards!r}: expected an object with the name of each guard")
        return cls(**{**item, "skipped": SkippedData.from_json(item.get("skipped", []))})


def step_folder(root: Path, step: int) -> Path:
    """Return the final folder of the checkpoint after `step` steps."""
    return root / f"step_{step:08d}"


def checkpoints(root: Path) -> list[Path]:
    """Return all checkpoints that were published, newest first; they may have been damaged since."""
    return sorted(filter(_has_step, root.glob("step_*")), reverse=True)


def _has_step(folder: Path) -> bool:
    return folder.name.startswith("step_") and folder.name[5:].isdigit()


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(folder.name[5:])


def newest_whole(folders: Iterable[Path], check: Callable[[Path], list[str]], warn: bool = True) -> Path | None:
    """Return the first checkpoint in which `check` finds no problem, or None.

    Args:
        folders: candidates, newest first, as `checkpoints` lists them.
        check: what is wrong with a checkpoint: `problems`, as thorough as its use needs.
        warn: log a warning for each that is passed over.
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
    heartbeat: Callable[[], object] = lambda: None,
    first_alone: bool = False,
) -> list[str]:
    """Return what is wrong with a checkpoint: files that are missing or damaged, or its manifest.

    Args:
        folder: the checkpoint.
        contents: compare checksums, which takes as long as reading. Without, only sizes are compared, and the checksum
            of config.yaml, which everybody reads.
        only: which files to look at, by name.
        share: which of these, in the order of their names, so that ranks can divide the work.
        heartbeat: is told of each part of a file that was read.
        first_alone: look no further than the first problem.

    Raises:
        FormatError: it is whole, and of another version.
        UnreadError: its manifest could not be read.
        OSError: another file could not be read.
    """
    try:
        manifest = read_manifest(folder)
    except (FormatError, UnreadError):  # not to be passed over
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


def _problem(
    folder: Path, name: str, expected: FileFacts, contents: bool, heartbeat: Callable[[], object]
) -> str | None:
    """Return what is wrong with one file of a checkpoint, whose size and checksum the manifest says."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
    if contents and _checksum(path, heartbeat) != expected["xxh3"]:
        return f"{name} has another checksum than when it was written"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or of a newer format; UnreadError, if it could not be read.
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
    """Refuse a manifest without step or files, with a value of another kind, or with a file outside of its folder.

    Its checksum says that it is as it was written, not who wrote it.
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
    """Return the checksum of everything else in a manifest."""
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _checksum(path: Path, heartbeat: Callable[[], object]) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            heartbeat()
    return digest.hexdigest()
