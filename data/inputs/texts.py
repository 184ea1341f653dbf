"""Read files of text, each one document or several between separators."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from plumbline.data.inputs.reading import Reading
from plumbline.data.inputs.records import BINARY, NOT_UTF8, PACKED, Record, Unit, record_of_text
from plumbline.data.preparation.long_text import go_to_text

LOOKED_AT = 4096  # bytes at the beginning of a file that tell its kind; spaces are skipped
BLOCK_BYTES = 1 << 20
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")
"""Endings of packed files, which are left out unless a format reads them."""
CONVERT = "convert it to UTF-8, as iconv does"
"""The remedy for a file in another encoding."""
OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


def read_texts(reading: Reading, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read small text files; `after` counts files."""
    for number in range(at or 0, len(unit.names)):
        name = unit.names[number]
        if name.lower().endswith(PACKED_SUFFIXES):
            yield Record(None, PACKED, "packed; unpack it", name, 0, number + 1)
            continue
        data = Path(name).read_bytes()
        if is_binary(data):
            yield Record(None, BINARY, "a binary file", name, 0, number + 1)
            continue
        try:
            text = data.removeprefix(codecs.BOM_UTF8).decode()  # not read_text, which would change line ends
        except UnicodeDecodeError as error:
            yield Record(None, NOT_UTF8, f"{error}; {CONVERT}", name, 0, number + 1)
            continue
        documents = [text] if reading.document_separator is None else text.split(reading.document_separator)
        for document in documents[:-1]:
            yield record_of_text(document, name, 0, None)
        yield record_of_text(documents[-1], name, 0, number + 1)


def read_separated(reading: Reading, unit: Unit, at: int | None) -> Iterator[Record]:
    """Read a large text file document by document; `after` counts bytes."""
    (name,) = unit.names
    separator = (reading.document_separator or "").encode()
    with Path(name).open("rb") as file:
        if is_binary(file.read(LOOKED_AT)):
            yield Record(None, BINARY, "a binary file", name, 0, None)
            return
        file.seek(0)
        if at is None and (problem := not_utf8(file)):
            yield Record(None, NOT_UTF8, problem, name, 0, None)
            return
        file.seek(0)
        begin = at or go_to_text(file)  # of the document within the file
        file.seek(begin)
        buffer, searched = bytearray(), 0
        while block := file.read(BLOCK_BYTES):
            buffer += block
            first = 0
            while (end := buffer.find(separator, max(first, searched))) >= 0:
                document, first = bytes(buffer[first:end]), end + len(separator)
                begin += len(document) + len(separator)
                yield record_of_text(document.decode(), name, 0, begin)
            del buffer[:first]
            searched = max(0, len(buffer) - len(separator) + 1)
        yield record_of_text(buffer.decode(), name, 0, None)


def is_binary(data: bytes) -> bool:
    """Return whether a file that begins with `data` is binary: more than 1 % of its first bytes are 0.

    UTF-16 and UTF-32 with a byte order mark are text in another encoding.
    """
    start = data[:LOOKED_AT]
    return start.count(0) > len(start) / 100 and not start.startswith(OTHER_ENCODINGS)


def not_utf8(file: BinaryIO) -> str | None:
    """Return the decoder's message about the first byte that is not UTF-8, and the remedy; None if all are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while block := file.read(BLOCK_BYTES):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = file.tell() - len(error.object) + error.start  # the decoder counts from the beginning of the last block
        byte = f"byte {error.object[error.start]:#04x} in position {at}"
        return f"'utf-8' codec can't decode {byte}: {error.reason}; {CONVERT}"
    return None
