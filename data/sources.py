"""Read each source of text as a stream of documents, in the same order every time.

    PATH, GLOB, DIRECTORY       .jsonl[.gz] and .parquet: one document per row; any other file: one document per file
    hf:NAME[:CONFIG[:SPLIT]]    a Hugging Face dataset from the hub or a local folder, streamed; SPLIT is train
    stdlib                      the Python standard library's own source code, already on every machine

A new kind of file is one more reader in `_read_file`; a new kind of source is one more branch in `_read`.
"""

import glob
import gzip
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash


@dataclass(frozen=True)
class Sources:
    """State which sources to read, and how."""

    specs: tuple[str, ...]
    text_key: str = "text"
    """The field or column of .jsonl, .parquet and hf: rows that holds the text."""
    document_separator: str | None = None
    """Cuts plain-text files into documents; None: one document per file."""

    def fingerprint(self) -> str:
        """Return a hash of the names, sizes and modification times of all files; of a dataset on the hub, of its name.

        Raises:
            ValueError: a source names no file.
        """
        digest = xxhash.xxh3_64()
        for spec in self.specs:
            digest.update(f"{spec}\n".encode())
            for path in _files_of(spec):
                status = path.stat()
                digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        """Yield every document, the same sequence at each call.

        Args:
            skipped: Counts documents left out, by reason: "not UTF-8" (files, rows or half characters that are not
                text) and "empty" (nothing but white space).

        Raises:
            ValueError: a row is malformed, or has no field `text_key`; the message names the file and the row.
        """
        for spec in self.specs:
            for text in self._read(spec):
                if text is None or not _encodable(text):
                    skipped["not UTF-8"] += 1
                elif not text.strip():
                    skipped["empty"] += 1
                else:
                    yield text

    def _read(self, spec: str) -> Iterator[str | None]:
        if spec.startswith("hf:"):
            yield from self._read_hugging_face(spec)
        else:
            for path in _files_of(spec):
                yield from self._read_file(path)

    def _read_file(self, path: Path) -> Iterator[str | None]:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from self._read_json_lines(path)
        elif path.suffix == ".parquet":
            yield from self._read_parquet(path)
        else:
            yield from self._read_plain(path)

    def _read_plain(self, path: Path) -> Iterator[str | None]:
        try:
            text = path.read_bytes().decode()  # not read_text: line ends are part of the text
        except UnicodeDecodeError:
            yield None
            return
        if self.document_separator is None:
            yield text
        else:
            yield from text.split(self.document_separator)

    def _read_json_lines(self, path: Path) -> Iterator[str | None]:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            try:
                for number, line in enumerate(map(bytes.strip, lines), start=1):
                    if line:
                        yield self._parse_line(line, f"{path}:{number}")
            except (EOFError, gzip.BadGzipFile) as error:
                raise ValueError(f"{path}: not a whole gzip file ({error}); copy it again") from error

    def _parse_line(self, line: bytes, where: str) -> str | None:
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            return None
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}); fix or remove it") from error
        return self._text_of(row, where)

    def _read_parquet(self, path: Path) -> Iterator[str | None]:
        import pyarrow.parquet  # comes with datasets; only needed here

        try:
            table = pyarrow.parquet.ParquetFile(path)
        except ValueError as error:
            raise ValueError(f"{path}: not a parquet file ({error}); copy it again") from error
        if self.text_key not in table.schema_arrow.names:
            raise ValueError(_no_field(self.text_key, table.schema_arrow.names, str(path)))
        row = 0
        for rows in table.iter_batches(batch_size=1024, columns=[self.text_key]):
            for value in rows.column(0).to_pylist():
                yield self._text_of({self.text_key: value}, f"{path}: row {row}")
                row += 1

    def _read_hugging_face(self, spec: str) -> Iterator[str | None]:
        import datasets  # slow to import, and only needed here

        name, config, split = (*spec.removeprefix("hf:").split(":"), "", "")[:3]
        try:
            rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"--source {spec}: datasets cannot load it: {str(error).splitlines()[0]}") from error
        for number, row in enumerate(rows):
            yield self._text_of(row, f"{spec}: row {number}")

    def _text_of(self, row: Any, where: str) -> str:
        if not isinstance(row, dict) or self.text_key not in row:
            raise ValueError(_no_field(self.text_key, row if isinstance(row, dict) else (), where))
        text = row[self.text_key]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise ValueError(f"{where}: field {self.text_key!r} is {type(text).__name__}, expected text")
        return text


def _no_field(key: str, fields: Any, where: str) -> str:
    return f"{where}: no field {key!r} (fields: {', '.join(fields) or 'none'}); name the right one with --text-key"


def _encodable(text: str) -> bool:
    """Return False for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _files_of(spec: str) -> list[Path]:
    """Return the local files of a source, sorted; none for a dataset on the hub.

    Raises:
        ValueError: there is no such file.
    """
    if spec.startswith("hf:"):
        folder = Path(spec.removeprefix("hf:").split(":")[0])
        return _files_under(folder) if folder.is_dir() else []
    if spec == "stdlib":
        files = [path for path in _files_under(Path(sysconfig.get_path("stdlib"))) if path.suffix == ".py"]
    elif Path(spec).is_dir():
        files = _files_under(Path(spec))
    else:
        matches = [spec] if Path(spec).is_file() else glob.glob(spec, recursive=True)  # noqa: PTH207 - absolute globs
        files = sorted(path for path in map(Path, matches) if path.is_file())
    if not files:
        raise ValueError(f"--source {spec}: no file matches; give a file, a folder, a glob, hf:NAME or stdlib")
    return files


def _files_under(folder: Path) -> list[Path]:
    """Return files at any depth, without hidden ones, installed packages and caches."""
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") or part in left_out for part in path.relative_to(folder).parts)
    )
