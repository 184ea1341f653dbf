r"""Cut a document that is too large to be tokenized at once, by a rule that depends only on the document.

A document of more than `PART_BYTES` is cut once in each range [k * PART_BYTES, (k + 1) * PART_BYTES) of its bytes after
the first range: at the first line start between two characters that are not white space, else at the first line start,
else at the first character. The parts are tokenized separately and are one document again in the index.

Byte-level BPE with GPT-2's or a later rule for words, SentencePiece by lines (train-unigram) and bytes never join
characters across the first kind of cut, so they give the same tokens as for the whole text. A text whose lines end in
\r\n has no such cuts, since \r is white space: there, BPE tokens can differ at the cuts. A tokenizer that begins every
text with an extra character, as Llama 2's does with a space, adds one at the beginning of each part.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

PART_BYTES = 4 << 20
"""Bytes of text that are tokenized at once; the library needs about 110 bytes of memory for each."""
BLOCK_BYTES = 1 << 20
BEFORE = 4
"""Bytes before a range that are examined with it: a line end and the character before it."""
_TWO_BYTES = rb"\xc2[\x85\xa0]"  # Unicode white space that \S of bytes does not know
_THREE_BYTES = rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
GOOD_CUT = re.compile(rb"\S(?<!%b)(?<!%b)\n(?=\S)(?!%b|%b)" % (_TWO_BYTES, _THREE_BYTES, _TWO_BYTES, _THREE_BYTES))


def parts(data: bytes) -> Iterator[bytes]:
    """Yield a document part by part; a short one in one part."""
    begin = 0
    for nominal in range(PART_BYTES, len(data), PART_BYTES):
        cut = nominal - BEFORE + find_cut(data[nominal - BEFORE : nominal + PART_BYTES])
        yield data[begin:cut]
        begin = cut
    yield data[begin:]


def find_cut(window: bytes) -> int:
    """Return where in a window to cut; the window begins `BEFORE` bytes before the range of the cut."""
    if good := GOOD_CUT.search(window, BEFORE - 2):
        return good.end()
    if line_start := window.find(b"\n", BEFORE - 1, len(window) - 1) + 1:
        return line_start
    return next((place for place in range(BEFORE, len(window)) if window[place] & 0xC0 != 0x80), len(window))


def read_part(path: Path, begin: int, end: int, number: int) -> bytes:
    """Read part `number` of the document that lies in bytes `begin` to `end` of the text of a file."""
    with path.open("rb") as file:
        start = go_to_text(file)

        def cut(nominal: int) -> int:
            if nominal == begin or nominal >= end:
                return min(nominal, end)
            file.seek(start + nominal - BEFORE)
            return nominal - BEFORE + find_cut(file.read(min(PART_BYTES, end - nominal) + BEFORE))

        first = cut(begin + number * PART_BYTES)
        last = cut(begin + (number + 1) * PART_BYTES)
        file.seek(start + first)
        return file.read(last - first)


class Scan(NamedTuple):
    """Hold the findings of one pass over a text file."""

    size: int
    characters: int
    blank: bool
    """Whether the text is only white space."""
    place: int
    """Hash of the bytes, keyed by the seed (heldout.place)."""


def scan(path: Path, seed: int) -> Scan | None:
    """Scan a whole file in little memory; return None if it is not UTF-8."""
    digest = xxhash.xxh3_64(seed=seed)
    size = characters = 0
    blank = True
    try:
        for data, text in _decoded(path):
            digest.update(data)
            size += len(data)
            characters += len(text)
            blank = blank and not text.strip()
    except UnicodeDecodeError:
        return None
    return Scan(size, characters, blank, digest.intdigest())


def byte_of_cut(path: Path, at: int) -> int:
    """Return the byte of the first line start after character `at` of a text, or of that character if there is none."""
    characters = offset = found = 0
    searching = False
    with path.open("rb") as file:
        size = path.stat().st_size - go_to_text(file)
    for data, text in _decoded(path):
        if not searching and characters + len(text) > at:
            searching = True
            found = offset + len(text[: at - characters].encode())
            text = text[at - characters :]
            data = text.encode()
            offset = found
        if searching and (line_start := data.find(b"\n") + 1):
            cut = offset + line_start
            return cut if cut < size else found
        characters += len(text)
        offset += len(data)
    return found


def _decoded(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yield blocks of whole characters as bytes and as text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        go_to_text(file)
        while block := file.read(BLOCK_BYTES):
            text = decoder.decode(block)
            yield text.encode(), text
        decoder.decode(b"", final=True)


def go_to_text(file: BinaryIO) -> int:
    """Go from the beginning of a file to that of its text, behind a byte order mark, and return that byte."""
    start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    return file.seek(start)
