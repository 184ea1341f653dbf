"""Find the files that a source names, and decide how each is read.

A folder is read whole except for hidden files, installed packages, caches and corpora; files in it that are not read as
one might expect are counted, so that a warning can name them.
"""

import codecs
import glob
import json
import os
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from plumbline.data.manifest import MANIFEST
from plumbline.data.preparation.long_text import PART_BYTES

LINES = (".jsonl", ".jsonlines", ".jl", ".ndjson")
COMPRESSED_LINES = tuple(f"{lines}{packed}" for lines in (*LINES, ".json") for packed in (".gz", ".zst"))
ROWS = (*LINES, *COMPRESSED_LINES, ".parquet", ".arrow")
TABLES = (".csv", ".tsv", ".xls", ".xlsx")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")
ARRAY = re.compile(rb"\s*\[\s*\{")
"""The beginning of a .json file that holds one array of objects."""
LOOKED_AT = 4096  # bytes at the beginning of a file that tell its kind; spaces are skipped
LEFT_OUT = ("site-packages", "dist-packages", "__pycache__")
"""Folders that are skipped inside other folders: installed packages and caches."""
NOT_READ = {
    "packed": f"is packed, and of such files {', '.join(COMPRESSED_LINES)} are read: unpack it",
    "table": "a table, which would be read as one text, its commas included: write it as .jsonl or .parquet, a "
    "document in each row",
    "array": "one array of JSON objects, which would be read as one text: write it as .jsonl, one object a "
    "line; or name the folder it is in, of which it is one text",
    "rows": "lines that are JSON objects, which would be read as one text: give it a name that ends in .jsonl; or name "
    "the folder it is in, of which it is one text",
}
"""Kinds of files that are refused if they are named, and the remedy."""
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


def kind_of(path: Path, fields: Collection[str]) -> str:
    """Return how a file is read, judged by its suffix, and for .json by its first lines as well.

    Args:
        path: the file.
        fields: the fields of a row from which the text is made.
    """
    name = path.name.lower()
    if name.endswith(COMPRESSED_LINES):
        return "compressed lines"
    if name.endswith(LINES) or (name.endswith(".json") and _begins_with_rows(path, fields)):
        return "lines"
    return {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix.lower(), "text")


def _begins_with_rows(path: Path, fields: Collection[str]) -> bool:
    """Return whether the first two lines of a file are objects, as in an unpacked .json.gz.

    The only line of a file counts as a row if it has the fields: in a folder of code it is rather a setting or a
    manifest.
    """
    rows = _first_rows(path)
    return len(rows) == 2 or (len(rows) == 1 and rows[0].keys() >= set(fields))


def _first_rows(path: Path) -> list[dict[str, Any]]:
    """Return the first two lines of a file, without blank ones, if all are objects, else an empty list.

    A line longer than `PART_BYTES` is not taken for an object: it may be all of a large file.
    """
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        while len(rows) < 2 and (line := file.readline(PART_BYTES)):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return []
            if not isinstance(row, dict):
                return []
            rows.append(row)
    return rows


def _is_array_of_rows(path: Path) -> bool:
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        return ARRAY.match(file.read(LOOKED_AT).removeprefix(codecs.BOM_UTF8)) is not None


def files_of(spec: str) -> list[Path]:
    """Return the files of a path, a glob, a folder or `stdlib`, sorted and without duplicates.

    Raises:
        ValueError: there is no such file.
    """
    named = _named_by(spec)
    again = _again(named)
    return [path for path in named if path not in again]


def check_no_rows(spec: str, files: Iterable[Path]) -> None:
    """Refuse files that would be read as one text each though their lines are JSON objects, unless found in a folder.

    Raises:
        ValueError: names the first such file.
    """
    if not Path(spec).is_dir() and (path := next(filter(_is_text_of_rows, files), None)):
        raise ValueError(f"--source {path}: {NOT_READ['rows']}")


def _again(paths: list[Path]) -> dict[Path, Path]:
    """Return the duplicate names of files, each with the name by which the file is read.

    A name that is read as rows is preferred, then a link: in a cache of the hub only the link has a suffix.
    """
    real = {folder: os.path.realpath(folder) for folder in {path.parent for path in paths}}
    links = {path for path in paths if path.is_symlink()}
    if not links and len(set(real.values())) == len(real):
        return {}
    first: dict[str, Path] = {}
    again = {}
    for path in sorted(paths, key=lambda path: (not path.name.lower().endswith((*ROWS, ".json")), path not in links)):
        target = os.path.realpath(path) if path in links else f"{real[path.parent]}/{path.name}"
        if (read := first.setdefault(target, path)) != path:
            again[path] = read
    return again


def _named_by(spec: str) -> list[Path]:
    """Return the files of a source, sorted, under all their names; raise ValueError as `files_of` does."""
    if Path(spec).is_dir() and not os.access(spec, os.R_OK | os.X_OK):
        raise ValueError(f"--source {spec}: a folder that you may not open")
    if spec == "stdlib":
        files = [path for path in files_under(Path(sysconfig.get_path("stdlib"))) if path.suffix == ".py"]
    elif Path(spec).is_dir():
        files = files_under(Path(spec))
    else:
        matches = [spec] if Path(spec).is_file() else glob.glob(spec, recursive=True)  # noqa: PTH207 - absolute globs
        files = sorted(path for path in map(Path, matches) if path.is_file())
        _check_folders(spec, matches)
        for path in files:
            if kind := _not_read(path):
                raise ValueError(f"--source {path}: {NOT_READ[kind]}")
    if not files:
        if spec == "-" or spec.startswith("/dev/") or "://" in spec:
            raise ValueError(
                f"--source {spec}: no file matches; pipes and URLs are not read, for text is read twice: save it"
            )
        if Path(spec).is_dir() and _strange(Path(spec)) == "corpus":
            raise ValueError(f"--source {spec}: is a corpus already; --merge and --append make larger ones")
        there = f" ({found})" if _is_folder(spec) and (found := _strange_among(_below(Path(spec)))) else ""
        raise ValueError(f"--source {spec}: no file matches{there}; give a file, a folder, a glob, hf:NAME or stdlib")
    return files


def _check_folders(spec: str, matches: list[str]) -> None:
    """Refuse a glob that matches a folder but not its contents, which would be left out.

    Raises:
        ValueError: names the folder.
    """
    if "**" in spec:  # recursive by itself
        return
    for folder in map(Path, sorted(matches)):
        if folder.is_dir() and folder.name not in LEFT_OUT and any(path.is_file() for path in _below(folder)):
            raise ValueError(
                f"--source {spec}: matches {folder}, a folder, and none of the files in it: name the folder as a "
                "source of its own, or match files at any depth with **"
            )


def surprises_in(spec: str, fields: Collection[str]) -> str:
    """Return a description of what in a source is not read as one might expect, with counts and examples, or "".

    A folder is walked only once.

    Args:
        spec: the source.
        fields: the fields of a row from which the text is made.

    Raises:
        ValueError: there is no such file.
    """
    below = list(_below(Path(spec))) if _is_folder(spec) else []
    named = _files_among(below) or _named_by(spec)  # raises if a folder has no file
    again = _again(named)
    twice = ""
    if again:
        name, read = min(again.items())
        twice = f"files that links name again are read once ({len(again):,}, such as {name}, which is {read})"
    strange = _strange_among(path for path in below if path not in again)
    beside = _texts_beside_rows([path for path in named if path not in again], fields) if below else ""
    return "; ".join(filter(None, (twice, strange, beside)))


def _is_folder(spec: str) -> bool:
    return spec != "stdlib" and Path(spec).is_dir()


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


def _texts_beside_rows(files: list[Path], fields: Collection[str]) -> str:
    """Return which files are read as one text each although most bytes of their folder are rows, or ""."""
    rows = [path for path in files if path.name.lower().endswith(ROWS)]
    texts = [path for path in files if rows and _not_read(path) is None and kind_of(path, fields) == "text"]
    if not texts or sum(path.stat().st_size for path in texts) > sum(path.stat().st_size for path in rows):
        return ""
    remedy = "move them elsewhere, or name the files of rows by a glob"
    return f"files beside those of rows are read as one text each: {remedy} ({len(texts):,}, such as {texts[0]})"


def _strange(path: Path) -> str | None:
    """Return the `IN_FOLDER` kind of a path in a folder, or None if it is read as expected."""
    if path.is_file():
        return _not_read(path) or ("rows" if _is_text_of_rows(path) else None)
    if path.is_symlink():
        return "link"
    if not os.access(path, os.R_OK | os.X_OK):
        return "closed"
    return "corpus" if _is_corpus(path) else None


def _not_read(path: Path) -> str | None:
    """Return the `NOT_READ` kind of a file whose rows or texts cannot be read, or None for any other file."""
    if is_packed(path):
        return "packed"
    if path.suffix.lower() in TABLES:
        return "table"
    return "array" if _is_array_of_rows(path) else None


def _is_text_of_rows(path: Path) -> bool:
    return not path.name.lower().endswith((*ROWS, ".json")) and len(_first_rows(path)) == 2


def is_packed(path: Path) -> bool:
    """Return whether a file is compressed in an unsupported way."""
    name = path.name.lower()
    return name.endswith(PACKED) and not name.endswith(COMPRESSED_LINES)


def files_under(folder: Path) -> list[Path]:
    """Return the files at any depth that `_below` finds."""
    return _files_among(_below(folder))


def _files_among(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are files, sorted."""
    return sorted(path for path in paths if path.is_file())


def _below(folder: Path) -> Iterator[Path]:
    """Yield the contents of a folder at any depth, without hidden files, `LEFT_OUT` and the targets of folder links.

    A corpus is yielded as a folder, without its contents.
    """
    for root, folders, files in os.walk(folder):
        if MANIFEST in files and _is_corpus(Path(root)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not (name.startswith(".") or name in LEFT_OUT)]
        for name in (*folders, *files):
            if not (name.startswith(".") or name in LEFT_OUT):
                yield Path(root, name)


def _is_corpus(folder: Path) -> bool:
    """Return whether a folder was made by prepare.py."""
    return (folder / MANIFEST).is_file() and ((folder / "tokenizer").is_dir() or any(folder.glob("generation-*")))
