"""Damage files: bytes that are cut, lost or replaced, and JSON or YAML with a value of another kind."""

import json
import math
import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash
import yaml

from plumbline.launcher.runtime.checkpoint.store import MANIFEST, manifest_checksum
from plumbline.launcher.runtime.system.files import write_json


def _header(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[bytes], bytes]:
    """Return what changes the header of a safetensors file."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header + content[8 + length :]

    return changed


def _tensors(change: Callable[[str, dict[str, Any]], tuple[str, Any]]) -> Callable[[bytes], bytes]:
    """Return what changes each tensor's name and entry in the header of a safetensors file."""
    return _header(lambda header: dict(item if item[0] == "__metadata__" else change(*item) for item in header.items()))


def _words(offset: int, number: bytes) -> Callable[[bytes], bytes]:
    """Return what writes bytes at an offset."""
    return lambda content: content[:offset] + number + content[offset + len(number) :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "noise": lambda content: random.Random(1).randbytes(max(64, min(len(content), 4096))),
    "not UTF-8": lambda content: content[: len(content) // 3] + b"\xff\xfe" + content[len(content) // 3 :],
    "zeros": lambda content: bytes(len(content)),
    "[]": lambda _: b"[]",
    "{}": lambda _: b"{}",
    "null": lambda _: b"null",
    "7": lambda _: b"7",
    "deep": lambda _: b"[" * 100_000 + b"]" * 100_000,
    "huge number": lambda _: b"9" * 10_000,
    "longer": lambda content: content + bytes(64),
    "ids beyond": lambda content: b"\xf0\xff" * (len(content) // 2),
    "no tensors": lambda _: struct.pack("<Q", 2) + b"{}",
    "renamed tensors": _tensors(lambda name, facts: (f"x{name}", facts)),
    "other type": _tensors(lambda name, facts: (name, {**facts, "dtype": "I32"})),
    "other shape": _tensors(lambda name, facts: (name, {**facts, "shape": [1, *facts["shape"]]})),
    "not finite": lambda content: content[:-4] + struct.pack("<f", math.nan),  # of a last tensor in fp32
    "no metadata": _header(lambda header: {name: facts for name, facts in header.items() if name != "__metadata__"}),
    "other version": _words(9, struct.pack("<Q", 2)),  # of a Megatron-LM index, and those that follow
    "other dtype": _words(17, b"\x07"),
    "many sequences": _words(18, struct.pack("<Q", 2**60)),
    "negative lengths": _words(34, struct.pack("<i", -5) * 20),
    "wild pointers": _words(34 + 4 * 20, struct.pack("<q", 2**62) * 20),
}
"""Kinds of damage, by the names that cases use."""


PLACES: dict[str, Callable[[Path], object]] = {
    "gone": lambda _: None,
    "folder": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
}
"""What stands in the place of a file."""


def damage(path: Path, how: str | Mapping[str, Any]) -> None:
    """Damage a file by the name of a damage, or edit its JSON, of JSON Lines the first line, or its YAML."""
    if isinstance(how, str) and how in PLACES:
        path.unlink()
        PLACES[how](path)
    elif isinstance(how, str):
        path.write_bytes(DAMAGES[how](path.read_bytes()))
    else:
        first, end, rest = path.read_text(encoding="utf-8").partition("\n" if path.suffix == ".jsonl" else "\0")
        whole = yaml.safe_load(first) if path.suffix in (".yaml", ".yml") else json.loads(first)
        _edit(whole, how)
        path.write_text(json.dumps(whole) + end + rest, encoding="utf-8")  # JSON is YAML


def _edit(whole: Any, how: Mapping[str, Any]) -> None:
    """Give keys other values, a.b is key b of a; `absent` takes a key away."""
    for keys, value in how.items():
        place, path = whole, keys.split(".")
        while path and ".".join(path) not in place:
            place = place.get(path[0]) if isinstance(place.get(path[0]), dict) else place
            if len(path) == 1:
                break
            path = path[1:]
        key = ".".join(path)
        if value == "absent":
            del place[key]
        else:
            place[key] = value


def reseal(file: Path) -> None:
    """Make the manifest of a checkpoint fit a file that was changed, as whoever forges one would."""
    folder = next(parent for parent in file.parents if (parent / MANIFEST).is_file())
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest.pop("checksum", None)
    if file.name != MANIFEST:
        facts = {"bytes": file.stat().st_size, "xxh3": xxhash.xxh3_64_hexdigest(file.read_bytes())}
        manifest["files"][str(file.relative_to(folder))] = facts
    write_json(folder / MANIFEST, {**manifest, "checksum": manifest_checksum(manifest)})
