"""Read tensors of a checkpoint by name and range from its files; tensors.py describes the format."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from plumbline.data.damage import reading
from plumbline.launcher.runtime.checkpoint.store import CheckpointError, read_manifest
from plumbline.launcher.runtime.ranks.collectives import gather_objects, on_every_rank
from plumbline.launcher.runtime.ranks.world import World

FOLDER = "state"
"""Folder of the tensor files in a checkpoint."""


@dataclass(frozen=True)
class Header:
    """Hold a file's description of its tensors, without their values."""

    index: dict[str, Any]
    """Name -> shape, start of the file's range, tensors kept whole, and plain numbers."""
    lengths: dict[str, int]
    """Key -> number of elements of the file's range."""
    average: dict[str, int] | None
    """Half-life and tokens of the moving average, or None if there is none."""


def _read_header(path: Path) -> Header:
    """Return the header of a file.

    Raises:
        DamagedFileError: the file does not hold what its rank wrote, even if its checksum is right.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        metadata, lengths = file.metadata(), {}
        index = json.loads(metadata["index"])
        for key in file.keys():  # noqa: SIM118
            kept = file.get_slice(key)
            if kept.get_dtype() != "F32":
                raise ValueError(f"{key} is {kept.get_dtype()}, expected F32")
            kind, _, name = key.partition("/")
            if kind not in index[name]["whole"]:
                (lengths[key],) = kept.get_shape()
        return Header(index, lengths, json.loads(metadata.get("average", "null")))


def _names(folder: Path) -> list[str]:
    """Return the names of a checkpoint's tensor files."""
    return sorted(name for name in read_manifest(folder)["files"] if name.startswith(f"{FOLDER}/"))


def read_headers_together(folder: Path, world: World) -> dict[str, Header]:
    """Return the header of each file; each rank reads only some, so that not every rank opens every file. Collective.

    For a checkpoint on the nodes, where no two ranks have the same file, each reads its own.

    Raises:
        DamagedFileError: on all ranks, if a file does not hold what its rank wrote.
        OSError: on all ranks, if a file could not be read.
    """
    names = on_every_rank(lambda: _names(folder), world)

    def read(some: Sequence[str]) -> dict[str, Header]:
        return {name: _read_header(folder / name) for name in some}

    if any(theirs != names for theirs in gather_objects(names, world)):
        return on_every_rank(lambda: read(names), world)
    shares = gather_objects(on_every_rank(lambda: read(names[world.rank :: world.size]), world), world)
    found = {name: header for share in shares for name, header in share.items()}
    return {name: found[name] for name in names}


@dataclass(frozen=True)
class _Part:
    """Describe the range of a tensor that a file holds."""

    file: str
    start: int
    end: int


class SavedTensors:
    """Read tensors of a checkpoint by name and range, from the files of all the ranks that wrote it.

    Args:
        folder: the checkpoint, whose files have been verified.
        headers: headers of its files by name, if already read; then only files whose tensors are read are opened.

    Raises:
        DamagedFileError: a file does not hold what its rank wrote, whatever the checksums say.
    """

    def __init__(self, folder: Path, headers: Mapping[str, Header] | None = None) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape, of every tensor of the model."""
        self.kinds: dict[str, set[str]] = {}
        """Name -> what is stored elementwise: weight, ema, and names of the optimizer's states."""
        self.average: dict[str, int] | None = None
        """Half-life and tokens of the moving average, or None if there is none."""
        self._whole: dict[str, dict[str, str]] = {}
        self._numbers: dict[str, dict[str, float]] = {}
        self._parts: dict[str, list[_Part]] = {}
        if headers is None:
            headers = {name: _read_header(folder / name) for name in _names(folder)}
        for name, header in headers.items():
            self._note(name, header)

    def __enter__(self) -> "SavedTensors":
        """Return the reader, which opens files as they are needed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self._stack.close()

    def _note(self, file: str, header: Header) -> None:
        """Add the contents of a file."""
        self.average = header.average or self.average
        for name, entry in header.index.items():
            self.shapes[name] = tuple(entry["shape"])
            self._whole.setdefault(name, {}).update(dict.fromkeys(entry["whole"], file))
            self._numbers.setdefault(name, {}).update(entry["numbers"])
        for key, length in header.lengths.items():
            kind, _, name = key.partition("/")
            self.kinds.setdefault(name, set()).add(kind)
            start = header.index[name]["start"]
            self._parts.setdefault(key, []).append(_Part(file, start, start + length))

    def _open(self, file: str) -> Any:
        if file not in self._files:
            with reading(self._folder / file):
                self._files[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._files[file]

    def whole(self, name: str) -> dict[str, Any]:
        """Return the optimizer's states of a tensor that are not elementwise: kind -> a tensor or a number."""
        kept = {kind: self._open(file).get_tensor(f"{kind}/{name}") for kind, file in self._whole[name].items()}
        return {**kept, **self._numbers[name]}

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Return a range of a flattened tensor: fp32 [length], on the CPU.

        Raises:
            CheckpointError: the files do not hold all of it.
        """
        found = torch.empty(length)
        missing = length
        for part in self._parts.get(f"{kind}/{name}", ()):
            first, last = max(start, part.start), min(start + length, part.end)
            if first < last:
                saved = self._open(part.file).get_slice(f"{kind}/{name}")
                found[first - start : last - start] = saved[first - part.start : last - part.start]
                missing -= last - first
        if missing:
            raise CheckpointError(f"{self._folder}: lacks {missing} of {length} elements of {kind} of {name}")
        return found

    def tensor(self, kind: str, name: str) -> Tensor:
        """Return a tensor of the model, or its average, with its shape.

        Raises:
            CheckpointError: the files do not hold all of it.
        """
        shape = self.shapes[name]
        return self.read(kind, name, 0, torch.Size(shape).numel()).view(shape)
