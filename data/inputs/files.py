"""Read local files, and find those of a folder: all but hidden files, installed packages, caches and corpora."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path

from plumbline.data.inputs.formats import SEPARATED, TEXT, format_of, is_packed, may_be_rows
from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import Unit
from plumbline.data.inputs.source import Source
from plumbline.data.manifest import MANIFEST
from plumbline.data.preparation.long_text import PART_BYTES

UNIT_BYTES = 64 << 20
"""Most bytes of one unit: a range of a file of lines, or small files together."""
LEFT_OUT = ("site-packages", "dist-packages", "__pycache__")
"""Folders that are skipped inside other folders: installed packages and caches."""


class Files(Source):
    """Read local files, each once, listed when they are first asked for; a kind of source says which."""

    is_files = True

    @abstractmethod
    def named(self) -> list[Path]:
        """Return the files, sorted, under all their names.

        Raises:
            ValueError: there is none.
        """

    def files(self) -> list[Path]:
        """Return the files, sorted and without duplicates.

        Raises:
            ValueError: there is none.
        """
        named, again = self._listed
        return [path for path in named if path not in again]

    @cached_property
    def _listed(self) -> tuple[list[Path], dict[Path, Path]]:
        """Return all names, and those that repeat a file: a large folder takes minutes to list on a network's disk."""
        named = self.named()
        return named, again_in(named)

    def surprises(self) -> str:
        """Return which files have several names, or ""."""
        return read_once(self._listed[1])

    def units(self, number: int) -> Iterator[Unit]:
        """Yield the units of the files.

        Raises:
            ValueError: there is no file.
        """
        yield from units_of(number, self.files(), self.reading)


def state_of(path: Path) -> bytes:
    """Return the name, size and modification time of a file in one line: another one says that it has changed."""
    status = path.stat()
    return os.fsencode(f"{path} {status.st_size} {status.st_mtime_ns}\n")


def units_of(source: int, files: Iterable[Path], reading: Reading) -> Iterator[Unit]:
    """Yield the units of files: small texts together, large files of lines in ranges, all others one by one."""
    group: list[str] = []  # consecutive small files of text
    size = 0
    for path in files:
        kind = format_of(path, reading.fields)
        bytes_here = 0 if is_packed(path) else path.stat().st_size  # its bytes are not read
        is_small_text = kind is TEXT and bytes_here <= PART_BYTES
        if is_small_text:
            group.append(str(path))
            size += bytes_here
        if group and (not is_small_text or size > UNIT_BYTES):
            yield Unit(source, TEXT, tuple(group))
            group, size = [], 0
        if kind.begins_anywhere:
            for start in range(0, bytes_here, UNIT_BYTES):
                yield Unit(source, kind, (str(path),), start, min(start + UNIT_BYTES, bytes_here))
        elif kind is not TEXT:
            yield Unit(source, kind, (str(path),))
        elif not is_small_text:
            whole = reading.document_separator is None
            yield Unit(source, TEXT if whole else SEPARATED, (str(path),), in_parts=whole)
    if group:
        yield Unit(source, TEXT, tuple(group))


def again_in(paths: list[Path]) -> dict[Path, Path]:
    """Return the duplicate names of files, each with the name by which the file is read.

    A name that is read as rows is preferred, then a link: in a cache of the hub only the link has a suffix.
    """
    real = real_names(paths)
    if len(set(real.values())) == len(real):
        return {}
    first: dict[str, Path] = {}
    again = {}
    for path in sorted(paths, key=lambda path: (not may_be_rows(path), not path.is_symlink())):
        if (read := first.setdefault(real[path], path)) != path:
            again[path] = read
    return again


def real_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Return each path with its name without links; each folder is looked up once."""
    real_folder = lru_cache(maxsize=None)(os.path.realpath)
    return {
        path: os.path.realpath(path) if path.is_symlink() else os.path.join(real_folder(path.parent), path.name)  # noqa: PTH118
        for path in paths
    }


def read_once(again: dict[Path, Path]) -> str:
    """Return a description of the duplicate names that `again_in` found, or ""."""
    if not again:
        return ""
    name, read = min(again.items())
    return f"files that links name again are read once ({len(again):,}, such as {name}, which is {read})"


def files_under(folder: Path) -> list[Path]:
    """Return the files at any depth that `contents_of` finds."""
    return files_among(contents_of(folder))


def files_among(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are files, sorted."""
    return sorted(path for path in paths if path.is_file())


def contents_of(folder: Path) -> Iterator[Path]:
    """Yield the contents of a folder at any depth, without hidden files, `LEFT_OUT` and the targets of folder links.

    A corpus is yielded as a folder, without its contents.
    """
    for root, folders, files in os.walk(folder):
        if MANIFEST in files and is_corpus(Path(root)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not (name.startswith(".") or name in LEFT_OUT)]
        for name in (*folders, *files):
            if not (name.startswith(".") or name in LEFT_OUT):
                yield Path(root, name)


def is_corpus(folder: Path) -> bool:
    """Return whether a folder was made by prepare.py."""
    return (folder / MANIFEST).is_file() and ((folder / "tokenizer").is_dir() or any(folder.glob("generation-*")))
