"""List the inputs of a corpus in a fixed order, and cut them into units that one process reads.

    PATH, GLOB, DIRECTORY       .jsonl, .jsonlines, .jl, .ndjson, .json of such lines, each also as .gz or .zst,
                                .parquet, .arrow: one document per row; any other file: one document per file
    hf:NAME[:CONFIG[:SPLIT]]    a Hugging Face dataset from the hub or a local folder, streamed; SPLIT is train
    stdlib                      the Python standard library's own source code, already on every machine

inputs/kinds.py has the table of kinds of sources, inputs/formats.py that of formats of files.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from plumbline.data.inputs.files import real_names, state_of
from plumbline.data.inputs.formats import may_be_rows
from plumbline.data.inputs.kinds import source_of
from plumbline.data.inputs.reading import Reading, readings_of
from plumbline.data.inputs.records import Unit
from plumbline.data.inputs.source import Source

MOST_FILES = 50_000
"""Most files that are recorded one by one in the manifest, which every start of a run reads."""
REPEAT = "leave one out; to read a text more often, give its corpus a larger weight or max_epochs in data.train"
"""The remedy for naming a text twice."""


@dataclass(frozen=True)
class Sources:
    """State which sources to read, and how."""

    specs: tuple[str, ...]
    reading: Reading = field(default_factory=Reading)

    @property
    def names(self) -> list[str]:
        """Return the sources as a manifest names them."""
        return list(map(printable, self.specs))

    def listed(self) -> "Listed":
        """Return the sources, to be listed anew."""
        return Listed(tuple(source_of(spec, self.reading) for spec in self.specs))

    def reading_as(self, request: Mapping[str, Any]) -> "Sources":
        """Return these sources, read as those of an earlier request were.

        Raises:
            ValueError: the parts of a merged corpus were read in more than one way.
        """
        ways = set(readings_of(request))
        if len(ways) > 1:
            raise ValueError(
                "--append: the corpora that were merged were read in different ways; name one, by --text-key, "
                "--text-template or --document-separator"
            )
        return Sources(self.specs, ways.pop())


@dataclass(frozen=True)
class Listed:
    """Hold sources whose local files are listed once, when they are first asked for, and not again."""

    sources: tuple[Source, ...]

    @property
    def are_files(self) -> bool:
        """Return whether the text of every source is that of its files."""
        return all(source.is_files for source in self.sources)

    def fingerprint(self) -> str:
        """Return a hash of the names, sizes and modification times of all files, and of the names of hub datasets.

        Raises:
            ValueError: a source names no file, or two name the same one.
        """
        digest = xxhash.xxh3_64()
        files = [(source, source.files()) for source in self.sources]
        self._check_once(files)
        for source, paths in files:
            digest.update(os.fsencode(f"{source.spec}\n"))
            for path in paths:
                digest.update(state_of(path))
        return digest.hexdigest()

    def file_keys(self) -> dict[str, Path]:
        """Return the files keyed by a hash of path, size, time and fields read; empty if more than `MOST_FILES`."""
        sources = [source for source in self.sources if source.is_files]
        if sum(len(source.files()) for source in sources) > MOST_FILES:
            return {}
        keys = {}
        for source in sources:
            reading = source.reading
            fields = reading.text_key if reading.template is None else repr(reading.template)
            for path, real in real_names(source.files()).items():
                status = path.stat()
                facts = f"{fields if may_be_rows(path) else ''}\n{real} {status.st_size} {status.st_mtime_ns}"
                keys[xxhash.xxh3_64_hexdigest(os.fsencode(facts))] = path
        return keys

    def _check_once(self, files: list[tuple[Source, list[Path]]]) -> None:
        """Refuse a file or a dataset that two sources name."""
        if len(self.sources) == 1:
            return
        first: dict[str, int] = {}  # real path, or name of a source -> number of the source
        for number, (source, paths) in enumerate(files):
            for name in real_names(paths).values() if source.is_files else [source.name]:
                if (before := first.setdefault(name, number)) != number:
                    both = f"{self.sources[before].spec} {source.spec}"
                    raise ValueError(f"source {both}: both name {name}, whose text would be there twice: {REPEAT}")

    def warnings(self) -> Iterator[str]:
        """Yield one line for each source with content that is not read as one might expect."""
        for source in self.sources:
            if found := source.surprises():
                yield printable(f"source {source.spec}: {found}")

    def units(self) -> Iterator[Unit]:
        """Yield every unit, in the order of the documents, the same at each call.

        Raises:
            ValueError: a source names no file, or is a dataset that cannot be opened.
            OSError: a dataset cannot be reached at the moment.
        """
        for number, source in enumerate(self.sources):
            yield from source.units(number)


def printable(text: str) -> str:
    """Return a text with escapes for what is not Unicode, such as bytes of a file name, which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()
