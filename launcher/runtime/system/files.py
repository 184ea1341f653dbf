"""Write files atomically, so that a file is complete or absent, and read files that may still be written.

`data.workspace` does the same for folders.
"""

import fcntl
import hashlib
import json
import math
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from plumbline.data.damage import DamagedFileError, in_words
from plumbline.data.disk import move, sync
from plumbline.launcher.runtime.system.log import LOG

T = TypeVar("T")
BLOCK = 2**20
"""Bytes of a file that are copied at once."""


def key_of(facts: Any) -> str:
    """Return 16 hexadecimal digits that identify JSON values, in whatever order their keys are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_key(values: Mapping[str, Any], key: str, kind: type[T], path: Path | str) -> T:
    """Return the value of a key among the values that were read from a file.

    Raises:
        DamagedFileError: the key is missing, or its value has another type; names the file, the key and the value.
    """
    value = values.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedFileError(f"{path}: {key} = {value!r}: expected a value of type {kind.__name__}")
    return value


def is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder that this user owns, rather than a link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: even if this process is killed, no partial file remains. Text is written as UTF-8."""
    with _in_place_of(path) as staging:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)


def write_start_anew(path: Path, size: int, ending: bytes) -> None:
    """Replace a file atomically by its first `size` bytes followed by `ending`."""
    with _in_place_of(path) as staging, path.open("rb") as old, staging.open("wb") as new:
        while block := old.read(min(BLOCK, size)):
            size -= new.write(block)
        new.write(ending)


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success, sync the file there and rename it to `path`."""
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.staging")  # several processes may write it at once
    try:
        with naming(path):
            yield staging
            sync(staging)
            move(staging, path)
    except OSError as error:
        if error.filename == str(staging):  # name the file that the caller knows
            error.filename = str(path)
        staging.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError without one, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on this file, over NFS too. The file is not deleted.

    If the file system has no locks, warn and continue without one.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            LOG.warning(f"{lock} cannot be locked ({error}): see to it that no other process is at {lock.parent}")
        yield


def remove_leftovers(path: Path) -> None:
    """Delete temporary files left by killed writers. No process may be writing `path`."""
    for leftover in path.parent.glob(f".{path.name}.*.staging"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document atomically, indented for people."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_json_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON Lines atomically, one object in each line."""
    write_whole(path, "".join(json.dumps(item) + "\n" for item in objects))


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, counted from 1, and the object of each line that is not blank.

    If the last line has no line end and is not valid JSON, it is skipped: it is still being written, or its writer
    was killed.

    Raises:
        DamagedFileError: any other line is not a JSON object, or the path is a folder; names the file and the line.
    """
    if path.is_dir():  # opening it would be an OSError, for which a job starts again
        raise DamagedFileError(f"{path}: a folder, not a file; move it away")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            item = parse_line(line, f"{path}, line {number}", line.endswith(b"\n")) if line.strip() else None
            if item is not None:
                yield number, item


def parse_line(line: bytes, place: str, has_end: bool) -> dict[str, Any] | None:
    """Return the object of a line, or None for an unfinished last line: it has no line end and is not valid JSON.

    Raises:
        DamagedFileError: any other line is not a JSON object; names the place.
    """
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not has_end:
            return None
        raise DamagedFileError(f"{place}: not JSON ({in_words(error)}); correct or remove the line") from error
    if not isinstance(item, dict):
        raise DamagedFileError(f"{place}: a {type(item).__name__}, not an object with keys")
    return item


def finite(value: Any) -> Any:
    """Return plain values in which None replaces every number that is not finite, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_keys(kind: type[T], item: Mapping[str, Any]) -> T:
    """Return a dataclass whose fields are the keys of a JSON object with the same names; other keys are ignored.

    Raises:
        KeyError: the object lacks the key of a field.
        ValueError: a value has another type than its field; names the key and the value.
    """
    values = {field.name: item[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    try:
        restored: T = _checker(cast(Any, kind)).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise KeyError(key) from error
        raise ValueError(f"{key} = {first['input']!r}: {first['msg']}") from error
    return restored


@cache
def _checker(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
