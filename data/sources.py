"""List the inputs of a corpus in a fixed order, and cut them into units that one process reads.

    PATH, GLOB, DIRECTORY       .jsonl, .jsonlines, .jl, .ndjson, .json of such lines, each also as .gz or .zst,
                                .parquet, .arrow: one document per row; any other file: one document per file
    hf:NAME[:CONFIG[:SPLIT]]    a Hugging Face dataset from the hub or a local folder, streamed; SPLIT is train
    stdlib                      the Python standard library's own source code, already on every machine

preparation/records.py has the reader for each kind of file.
"""

import json
import os
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from plumbline.data.damage import in_words
from plumbline.data.hub import is_reachable
from plumbline.data.preparation.long_text import PART_BYTES
from plumbline.data.source_files import ROWS, check_no_rows, files_of, files_under, is_packed, kind_of, surprises_in

UNIT_BYTES = 64 << 20
"""Most bytes of one unit: a range of a file of lines, or small files together."""
MOST_FILES = 50_000
"""Most files that are recorded one by one in the manifest, which every start of a run reads."""
REPEAT = "leave one out; to read a text more often, give its corpus a larger weight or max_epochs in data.train"
"""The remedy for naming a text twice."""
SAVED_SPLITS, SAVED_FILES = "dataset_dict.json", "state.json"  # files that `datasets` writes with save_to_disk


@dataclass(frozen=True)
class Unit:
    """Describe what one process reads in one go: some files, a range of one file, or a part of a dataset."""

    source: int
    """Index of the source, in the order of the command line."""
    kind: str
    """The reader, one of `records.READERS`."""
    names: tuple[str, ...]
    """Paths of files, or the name of a dataset."""
    start: int = 0
    stop: int = 0
    """Range of bytes of a file of lines; for a dataset, the number of the part and of all parts."""


@dataclass(frozen=True)
class Sources:
    """State which sources to read, and how."""

    specs: tuple[str, ...]
    text_key: str = "text"
    """The field or column of a row that holds the text; a.b is field b of field a."""
    document_separator: str | None = None
    """Separator that cuts plain-text files into documents, or None for one document per file."""
    template: str | None = None
    """Template that makes the text of a row from its fields, named in braces, or None for the field `text_key`
    alone."""

    def __post_init__(self) -> None:
        """Check the separator and the template.

        Raises:
            ValueError: the separator is empty, or the template names no field or uses more than plain fields.
        """
        if self.document_separator == "":
            raise ValueError("--document-separator is empty; leave it out to make each file one document")
        if self.template is None:
            return
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"--text-template {self.template!r}: {error}; write {{{{ for a brace") from error
        named = [part for part in parts if part[1] is not None]
        if not named or any(
            not (field or "").isidentifier() or form or conversion for _, field, form, conversion in named
        ):
            raise ValueError(
                f"--text-template {self.template!r}: expected names of fields in braces and nothing else in "
                "them, as in '{title}\\n\\n{text}'"
            )

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Return the fields of a row from which the text is made."""
        if self.template is None:
            return (self.text_key.partition(".")[0],)
        return tuple(dict.fromkeys(field for _, field, _, _ in string.Formatter().parse(self.template) if field))

    @property
    def names(self) -> list[str]:
        """Return the sources as a manifest names them."""
        return list(map(printable, self.specs))

    def fingerprint(self) -> str:
        """Return a hash of the names, sizes and modification times of all files, and of the names of hub datasets.

        Raises:
            ValueError: a source names no file, or two name the same one.
        """
        digest = xxhash.xxh3_64()
        files = [_files_of(spec) for spec in self.specs]
        self._check_once(files)
        for spec, paths in zip(self.specs, files, strict=True):
            digest.update(os.fsencode(f"{spec}\n"))
            for path in paths:
                status = path.stat()
                digest.update(os.fsencode(f"{path} {status.st_size} {status.st_mtime_ns}\n"))
        return digest.hexdigest()

    def file_keys(self) -> dict[str, Path]:
        """Return the files keyed by a hash of path, size, time and fields read; empty if more than `MOST_FILES`."""
        # Without datasets, whose configurations and splits may share files
        files = [path for spec in self.specs if not spec.startswith("hf:") for path in files_of(spec)]
        fields = self.text_key if self.template is None else repr(self.template)
        keys = {}
        for path in files if len(files) <= MOST_FILES else []:
            status = path.stat()
            read = fields if path.name.lower().endswith((*ROWS, ".json")) else ""
            facts = f"{read}\n{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"
            keys[xxhash.xxh3_64_hexdigest(os.fsencode(facts))] = path
        return keys

    def _check_once(self, files: list[list[Path]]) -> None:
        """Refuse a file or a dataset that two sources name."""
        if len(self.specs) == 1:
            return
        first: dict[str, int] = {}  # real path, or dataset -> number of its source
        for number, (spec, paths) in enumerate(zip(self.specs, files, strict=True)):
            names = ["hf:" + ":".join(_dataset_of(spec))] if spec.startswith("hf:") else map(os.path.realpath, paths)
            for name in names:
                if (before := first.setdefault(name, number)) != number:
                    raise ValueError(
                        f"--source {self.specs[before]} {spec}: both name {name}, whose text would be there twice: "
                        f"{REPEAT}"
                    )

    def warnings(self) -> Iterator[str]:
        """Yield one line for each source with content that is not read as one might expect."""
        for spec in self.specs:
            if not spec.startswith("hf:") and (found := surprises_in(spec, self.fields)):
                yield printable(f"--source {spec}: {found}")

    def reading_as(self, request: Mapping[str, Any]) -> "Sources":
        """Return these sources with the reading options of an earlier request (see `options`).

        Raises:
            ValueError: the parts of a merged corpus were read in more than one way.
        """
        ways = set(_ways_to_read(request))
        if len(ways) > 1:
            raise ValueError(
                "--append: the corpora that were merged were read in different ways; name one, by --text-key, "
                "--text-template or --document-separator"
            )
        return Sources(self.specs, *ways.pop())

    def options(self) -> dict[str, Any]:
        """Return the options that shape the documents; options newer than the format appear only if they are used."""
        always = {"text_key": self.text_key, "document_separator": self.document_separator}
        return always if self.template is None else {**always, "text_template": self.template}

    def units(self) -> Iterator[Unit]:
        """Yield every unit, in the order of the documents, the same at each call.

        Raises:
            ValueError: a source names no file, or is a dataset that cannot be opened.
            OSError: a dataset cannot be reached at the moment.
        """
        for number, spec in enumerate(self.specs):
            if spec.startswith("hf:"):
                yield from _units_of_dataset(number, spec)
            else:
                files = files_of(spec)
                check_no_rows(spec, files)
                yield from self._units_of_files(number, files)

    def _units_of_files(self, source: int, files: list[Path]) -> Iterator[Unit]:
        group: list[str] = []  # consecutive small files of text
        size = 0
        for path in files:
            kind = kind_of(path, self.fields)
            bytes_here = 0 if is_packed(path) else path.stat().st_size  # its bytes are not read
            if kind == "text" and bytes_here <= PART_BYTES:
                group.append(str(path))
                size += bytes_here
            if group and (kind != "text" or bytes_here > PART_BYTES or size > UNIT_BYTES):
                yield Unit(source, "text", tuple(group))
                group, size = [], 0
            if kind == "lines":
                for start in range(0, bytes_here, UNIT_BYTES):
                    yield Unit(source, kind, (str(path),), start, min(start + UNIT_BYTES, bytes_here))
            elif kind != "text":
                yield Unit(source, kind, (str(path),))
            elif bytes_here > PART_BYTES:
                yield Unit(source, "long text" if self.document_separator is None else "separated", (str(path),))
        if group:
            yield Unit(source, "text", tuple(group))


def _ways_to_read(request: Mapping[str, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the field, separator and template with which a corpus, or each part of a merged one, was read."""
    if parts := request.get("merged"):
        for part in parts:
            yield from _ways_to_read(part["request"])
    else:
        yield request.get("text_key", "text"), request.get("document_separator"), request.get("text_template")


def unescaped(text: str | None) -> str | None:
    r"""Return a separator or a template with the escapes \n, \r, \t and \\ of the command line replaced."""
    meant = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
    return None if text is None else re.sub(r"\\([nrt\\])", lambda found: meant[found[1]], text)


def printable(text: str) -> str:
    """Return a text with escapes for what is not Unicode, such as bytes of a file name, which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _units_of_dataset(source: int, spec: str) -> Iterator[Unit]:
    folder, _, split = _dataset_of(spec)
    saved = Path(folder) / split if (Path(folder) / SAVED_SPLITS).is_file() else Path(folder)
    if (saved / SAVED_FILES).is_file():  # written by save_to_disk: Arrow files, listed in order
        for entry in json.loads((saved / SAVED_FILES).read_text())["_data_files"]:
            yield Unit(source, "arrow", (str(saved / entry["filename"]),))
        return
    parts = open_dataset(spec).num_shards
    for part in range(parts):
        yield Unit(source, "hugging face", (spec,), part, parts)


def open_dataset(spec: str) -> Any:
    """Open a dataset for streaming.

    Raises:
        ValueError: `datasets` cannot load it, and trying again would not help.
        OSError: it cannot be reached at the moment.
    """
    import datasets  # slow to import, and only needed here

    name, config, split = _dataset_of(spec)
    if not Path(name).is_dir() and not is_reachable():
        raise OSError(f"--source {spec}: the hub cannot be reached; give files, or see to the network")
    try:
        return datasets.load_dataset(name, config or None, split=split, streaming=True)
    except MemoryError:
        raise
    except Exception as error:  # the hub's client has errors of its own
        text = f"--source {spec}: datasets cannot load it: {in_words(error)}"
        # RuntimeError: it is a script, which `datasets` no longer runs
        if isinstance(error, ValueError | RuntimeError | datasets.exceptions.DatasetsError):
            raise ValueError(text) from error
        raise OSError(f"{text}; see to the network: the same command goes on from here") from error


def _dataset_of(spec: str) -> tuple[str, str, str]:
    """Return name, configuration and split of hf:NAME[:CONFIG[:SPLIT]]."""
    name, config, split = (*spec.removeprefix("hf:").split(":"), "", "")[:3]
    return name, config, split or "train"


def _files_of(spec: str) -> list[Path]:
    """Return the local files of a source, sorted; empty for a dataset on the hub."""
    if not spec.startswith("hf:"):
        return files_of(spec)
    folder = Path(_dataset_of(spec)[0])
    return files_under(folder) if folder.is_dir() else []


def field_of(row: Mapping[str, Any], key: str) -> Any:
    """Return a field of a row, possibly nested; None if it is null. Raises KeyError if it is missing."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[part]
    return value
