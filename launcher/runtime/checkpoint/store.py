"""Checkpoints that exist whole or not at all.

A save writes into a hidden staging folder, every rank its own shards; the manifest (each file with size and checksum)
is written last, then the folder is renamed to its final name and the `latest` pointer replaced. So a folder with its
final name is complete, whatever was killed when. A load verifies the manifest and falls back to the newest checkpoint
that is whole.

    checkpoints/latest                      text: the name of the newest checkpoint, for people and scripts
    checkpoints/step_00001000/deepspeed/    DeepSpeed's shards: fp32 master weights, Adam moments
                              model-*.safetensors   fp32 weights under Hugging Face names: read without unpickling
                              ema-*.safetensors     the same of the moving average, if there is one
                              ema/          its shards, one for each rank
                              config.yaml   the resolved configuration
                              state.json    where training stood: step, samples, tokens
                              manifest.json every other file with size and checksum
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from plumbline.data.workspace import apply_umask, sync
from plumbline.launcher.runtime.checkpoint.weights import write_weights
from plumbline.launcher.runtime.config.load import save_config
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.interface import Engine
from plumbline.launcher.runtime.system.collectives import gather_objects
from plumbline.launcher.runtime.system.world import World

FORMAT = 1
MANIFEST, STATE, CONFIG, POINTER = "manifest.json", "state.json", "config.yaml", "latest"
WEIGHTS, EMA_WEIGHTS = "model", "ema"  # how the names of safetensors files begin


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or a resume that would contradict it."""


class BrokenWeightsError(CheckpointError):
    """Weights that are not finite: saved, they would take the place of a checkpoint that is of use."""


class FormatError(CheckpointError):
    """A whole checkpoint of another version: never passed over as damaged, since training would then overtake it."""


@dataclass(frozen=True)
class TrainState:
    """Where training stands. The data order, the schedule and dropout are pure functions of it and of the config."""

    step: int
    """Completed optimizer steps."""
    samples: int
    """Sequences consumed: position in the global data order."""
    tokens: int
    """Tokens consumed."""
    corpora: dict[str, str]
    """Path -> fingerprint of the corpora that the position counts in."""


def step_folder(root: Path, step: int) -> Path:
    """The final folder of the checkpoint after `step` steps."""
    return root / f"step_{step:08d}"


def checkpoints(root: Path) -> list[Path]:
    """Folders of all checkpoints that were published, newest first; they may still have been damaged since."""
    return sorted((path for path in root.glob("step_*") if path.name[5:].isdigit()), reverse=True)


def save(engine: Engine, config: Config, state: TrainState, root: Path, world: World) -> Path:
    """Write and publish the checkpoint of `state`; all ranks must call. Returns its folder.

    Raises:
        CheckpointError: a rank could not write (no space left, no permission); the earlier checkpoints are untouched.
        BrokenWeightsError: a weight is not finite; nothing is published.
    """
    final = step_folder(root, state.step)
    staging = root / f".{final.name}.staging"

    def make_room() -> None:
        if world.is_main:
            for leftover in root.glob(".step_*.staging"):  # of saves that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            staging.mkdir(parents=True)

    _all_ranks(world, make_room, staging)
    _all_ranks(world, lambda: engine.save(staging), staging)
    broken: list[str] = []
    weights = _noting_broken(engine.fp32_weights(), broken) if world.is_main else engine.fp32_weights()
    _raise_together(write_weights(weights, staging, WEIGHTS, world.is_main), world, staging)
    if broken := gather_objects(broken, world)[0]:
        if world.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise BrokenWeightsError(f"{len(broken)} tensors hold weights that are not finite, {broken[0]} for one")
    if engine.ema is not None:
        with engine.ema.in_place():
            problem = write_weights(engine.fp32_weights(), staging, EMA_WEIGHTS, world.is_main)
        _raise_together(problem, world, staging)

    def write_facts() -> None:
        if world.is_main:
            save_config(config, staging / CONFIG)
            _write_json(staging / STATE, asdict(state))

    _all_ranks(world, write_facts, staging)
    files = _checksum_together(staging, world)

    def publish() -> None:
        if not world.is_main:
            return
        manifest = {
            "format": FORMAT,
            "world_size": world.size,
            "zero_stage": config.deepspeed.zero_stage,
            "precision": config.deepspeed.precision,
            **asdict(state),
            "config_hash": xxhash.xxh3_64_hexdigest((staging / CONFIG).read_bytes()),
            "files": files,
        }
        _write_json(staging / MANIFEST, {**manifest, "checksum": _manifest_checksum(manifest)})
        apply_umask(staging)
        sync(staging)
        if final.exists():  # damaged, or load would have resumed from it: make room without a moment of neither
            _remove(final)
        staging.rename(final)
        sync(root)
        pointer = root / f".{POINTER}.staging"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        pointer.replace(root / POINTER)
        _prune(root, state.step, config)

    _all_ranks(world, publish, staging)
    return final


def _noting_broken(weights: Iterable[tuple[str, Tensor]], broken: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Pass named tensors on, and add the names of those that are not finite to `broken`."""
    for name, weight in weights:
        if not weight.isfinite().all():
            broken.append(name)
        yield name, weight


def newest_whole(folders: Iterable[Path], check: Callable[[Path], list[str]], warn: bool = True) -> Path | None:
    """Return the first checkpoint in which `check` finds no problem, or None.

    Args:
        folders: candidates, newest first, as `checkpoints` lists them.
        check: what is wrong with a checkpoint: `problems`, as thorough as its use needs.
        warn: print a warning for each that is passed over.
    """
    for folder in folders:
        found = check(folder)
        if not found:
            return folder
        if warn:
            print(f"warning: {folder} is damaged and passed over: {'; '.join(found[:3])}", file=sys.stderr, flush=True)
    return None


def problems(
    folder: Path,
    contents: bool = False,
    only: Callable[[str], bool] = lambda _name: True,
    share: slice = slice(None),
) -> list[str]:
    """Return what is wrong with a checkpoint: files that are missing or damaged, or its manifest.

    Args:
        folder: the checkpoint.
        contents: compare checksums, which takes as long as reading. Without, only sizes are compared, and the checksum
            of config.yaml, which everybody reads.
        only: which files to look at, by name.
        share: which of these, in the order of their names, so that ranks can divide the work.

    Raises:
        FormatError: it is whole, and of another version.
    """
    try:
        files = read_manifest(folder)["files"]
    except FormatError:  # not to be passed over
        raise
    except CheckpointError as error:
        return [str(error)]
    return [
        problem
        for name in sorted(filter(only, files))[share]
        if (problem := _problem(folder, name, files[name], contents or name == CONFIG))
    ]


def _problem(folder: Path, name: str, expected: dict[str, Any], contents: bool) -> str | None:
    """Return what is wrong with one file of a checkpoint, whose size and checksum the manifest says."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
    if contents and _checksum(path) != expected["xxh3"]:
        return f"{name} has another checksum than when it was written"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or of a newer format.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if manifest.pop("checksum", None) != _manifest_checksum(manifest):
        raise CheckpointError(f"{folder / MANIFEST} has another checksum than when it was written")
    if manifest["format"] != FORMAT:
        raise FormatError(f"{folder}: checkpoint format {manifest['format']}, this version reads {FORMAT}")
    return manifest


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    """Of everything else in the manifest, which vouches for the other files and has none to vouch for it."""
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _all_ranks(world: World, action: Any, folder: Path) -> None:
    """Run `action` on every rank; if it fails on one for want of space or rights, fail on all with one message."""
    error = None
    try:
        action()
    except (OSError, RuntimeError) as problem:  # torch.save reports a full disk as RuntimeError
        error = f"{type(problem).__name__}: {problem}"
    _raise_together(error, world, folder)


def _raise_together(error: str | None, world: World, folder: Path) -> None:
    errors = [f"rank {rank}: {message}" for rank, message in enumerate(gather_objects(error, world)) if message]
    if errors:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free / 2**30
        raise CheckpointError(
            f"{folder.parent}: checkpoint not written ({'; '.join(errors)}); {free:.2f} GiB are free there. "
            "Earlier checkpoints are whole: free some space there"
        )


def _checksum_together(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file, each rank doing its share and flushing what it read to disk."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    mine = {}

    def flush_and_read() -> None:
        for name in names[world.rank :: world.size]:
            sync(folder / name)  # some file systems notice only here that they are full
            mine[name] = {"bytes": (folder / name).stat().st_size, "xxh3": _checksum(folder / name)}

    _all_ranks(world, flush_and_read, folder)
    return {name: facts for share in gather_objects(mine, world) for name, facts in sorted(share.items())}


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Any, size: int = 2**24) -> Iterator[bytes]:
    while block := file.read(size):
        yield block


def _prune(root: Path, step: int, config: Config) -> None:
    """Delete all but the newest keep_last checkpoints and the multiples of keep_every.

    Checkpoints from beyond `step` go first: they are damaged, or training would have resumed from them, and must not
    take the place of a whole one. One that cannot be deleted (on NFS, a file of it is held open) is tried again after
    the next save: the new checkpoint is whole all the same.
    """
    every = config.checkpoint.keep_every
    beyond = [folder for folder in checkpoints(root) if int(folder.name[5:]) > step]
    older = [folder for folder in checkpoints(root) if folder not in beyond][config.checkpoint.keep_last :]
    for folder in beyond + [folder for folder in older if every is None or int(folder.name[5:]) % every]:
        try:
            _remove(folder)
        except OSError as error:
            warning = f"warning: {folder} cannot be deleted ({error}); the next save tries again"
            print(warning, file=sys.stderr, flush=True)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; the manifest first, so that a half-deleted one never passes for whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    sync(path)
