"""Read files that are named one by one or by a glob; what is not read as it may seem is an error."""

import glob
from collections.abc import Iterator
from pathlib import Path

from plumbline.data.inputs.files import LEFT_OUT, Files, contents_of, units_of
from plumbline.data.inputs.folder import Folder
from plumbline.data.inputs.formats import is_text_of_rows, packed_suffixes, why_not_read
from plumbline.data.inputs.records import Unit
from plumbline.data.inputs.source import KNOWN

NOT_READ = {
    "packed": f"is packed, and of such files {', '.join(packed_suffixes())} are read: unpack it",
    "table": "a table, which would be read as one text, its commas included: write it as .jsonl or .parquet, a "
    "document in each row",
    "array": "one array of JSON objects, which would be read as one text: write it as .jsonl, one object a "
    "line; or name the folder it is in, of which it is one text",
}
"""Files that are refused (formats.why_not_read), and the remedy."""
ROWS = (
    "lines that are JSON objects, which would be read as one text: give it a name that ends in .jsonl; or name the "
    "folder it is in, of which it is one text"
)


class NamedFiles(Files):
    """Read a file, or the files that a glob matches."""

    @classmethod
    def is_meant_by(cls, spec: str) -> bool:
        """Return whether an argument is no folder."""
        return not Folder.is_meant_by(spec)

    def named(self) -> list[Path]:
        """Return the files that match, sorted, under all their names.

        Raises:
            ValueError: there is none, one is not read, or a folder matches of which nothing else does.
        """
        # Absolute globs, which Path.glob refuses
        matches = [self.spec] if Path(self.spec).is_file() else glob.glob(self.spec, recursive=True)  # noqa: PTH207
        files = sorted({path for path in map(Path, matches) if path.is_file()})  # a glob may give one more than once
        self._check_folders(matches)
        for path in files:
            if kind := why_not_read(path):
                raise ValueError(f"source {path}: {NOT_READ[kind]}")
        if files:
            return files
        if self.spec == "-" or self.spec.startswith("/dev/") or "://" in self.spec:
            raise ValueError(
                f"source {self.spec}: no file matches; pipes and URLs are not read, for text is read twice: save it"
            )
        raise ValueError(f"source {self.spec}: no file matches; give {KNOWN}")

    def units(self, number: int) -> Iterator[Unit]:
        """Yield the units of the files, none of which may be one text though its lines are JSON objects.

        Raises:
            ValueError: names the first such file.
        """
        files = self.files()
        if path := next(filter(is_text_of_rows, files), None):
            raise ValueError(f"source {path}: {ROWS}")
        yield from units_of(number, files, self.reading)

    def _check_folders(self, matches: list[str]) -> None:
        """Refuse a glob that matches a folder but not its contents, which would be left out.

        Raises:
            ValueError: names the folder.
        """
        if "**" in self.spec:  # recursive by itself
            return
        for folder in map(Path, sorted(matches)):
            if folder.is_dir() and folder.name not in LEFT_OUT and any(path.is_file() for path in contents_of(folder)):
                raise ValueError(
                    f"source {self.spec}: matches {folder}, a folder, and none of the files in it: name the folder "
                    "as a source of its own, or match files at any depth with **"
                )
