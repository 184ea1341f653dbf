"""Read the files of a folder at any depth, and say what of them is not read as one might expect."""

import os
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path

from plumbline.data.inputs.dataset import SAVED_SPLITS, is_saved
from plumbline.data.inputs.files import Files, contents_of, files_among, is_corpus, read_once
from plumbline.data.inputs.formats import format_of, is_named_rows, is_text_of_rows, why_not_read
from plumbline.data.inputs.source import KNOWN

IN_FOLDER = {
    "corpus": "corpora that are prepared already are left out",
    "closed": "folders that you may not open are left out",
    "link": "links to folders or to nothing are not followed: name their targets as sources",
    "packed": "packed files are left out: unpack them",
    "table": "tables are read as one text each: write them as .jsonl or .parquet",
    "array": "arrays of JSON objects are read as one text each: write them as .jsonl",
    "rows": "files whose lines are JSON objects are read as one text each: name them .jsonl",
}
"""Kinds of files in a folder that cause a warning."""


class Folder(Files):
    """Read the files of a folder."""

    @classmethod
    def is_meant_by(cls, spec: str) -> bool:
        """Return whether an argument is a folder."""
        return spec != "" and Path(spec).is_dir()  # "", as of an unset variable, would be the working directory

    def named(self) -> list[Path]:
        """Return the files at any depth, sorted, under all their names.

        Raises:
            ValueError: there is none, or the folder may not be opened.
        """
        folder = Path(self.spec)
        if _is_closed(folder):
            raise ValueError(f"source {self.spec}: a folder that you may not open")
        if is_saved(folder):
            split = f" for its split train, or hf:{self.spec}::SPLIT" if (folder / SAVED_SPLITS).is_file() else ""
            raise ValueError(
                f"source {self.spec}: holds what `datasets` wrote with save_to_disk; give hf:{self.spec}{split}"
            )
        if files := files_among(self._below):
            return files
        if is_corpus(folder):
            raise ValueError(f"source {self.spec}: is a corpus already; --merge and --append make larger ones")
        there = f" ({found})" if (found := _strange_among(self._below)) else ""
        raise ValueError(f"source {self.spec}: no file matches{there}; give {KNOWN}")

    def surprises(self) -> str:
        """Return what is not read as one might expect."""
        _, again = self._listed
        strange = _strange_among(path for path in self._below if path not in again)
        beside = _texts_beside_rows(self.files(), self.reading.fields)
        return "; ".join(filter(None, (read_once(again), strange, beside)))

    @cached_property
    def _below(self) -> list[Path]:
        return list(contents_of(Path(self.spec)))


def _strange_among(below: Iterable[Path]) -> str:
    """Return a description of what in a folder is not read as one might expect, or ""."""
    found: dict[str, list[Path]] = {}
    for path in below:
        if kind := _strange(path):
            found.setdefault(kind, []).append(path)
    return "; ".join(
        f"{text} ({len(found[kind]):,}, such as {min(found[kind])})"
        for kind, text in IN_FOLDER.items()
        if kind in found
    )


def _strange(path: Path) -> str | None:
    """Return the `IN_FOLDER` kind of a path in a folder, or None if it is read as expected."""
    if path.is_file():
        return why_not_read(path) or ("rows" if is_text_of_rows(path) else None)
    if path.is_symlink():
        return "link"
    if _is_closed(path):
        return "closed"
    return "corpus" if is_corpus(path) else None


def _is_closed(folder: Path) -> bool:
    return not os.access(folder, os.R_OK | os.X_OK)


def _texts_beside_rows(files: list[Path], fields: Collection[str]) -> str:
    """Return which files are read as one text each although most bytes of their folder are rows, or ""."""
    rows = list(filter(is_named_rows, files))
    texts = [path for path in files if rows and why_not_read(path) is None and format_of(path, fields).is_text]
    if not texts or sum(path.stat().st_size for path in texts) > sum(path.stat().st_size for path in rows):
        return ""
    remedy = "move them elsewhere, or name the files of rows by a glob"
    return f"files beside those of rows are read as one text each: {remedy} ({len(texts):,}, such as {texts[0]})"
