"""Encode documents and decode tokens with a tokenizer folder written by `tokenizer_making.build_tokenizer`.

Any number of processes may read the same folder.
"""

import filecmp
import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from plumbline.data.damage import read_object, reading
from plumbline.data.indexed import Int64s, Integers, token_dtype

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (  # files of any tokenizer that transformers saves
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*",
)


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds any file of a tokenizer."""
    return any(file for pattern in FILES for file in folder.glob(pattern))


def check_words(tokenizer: Any) -> None:
    """Refuse the empty tokenizer that transformers makes up for a model whose folder lacks the vocabulary.

    Raises:
        ValueError: it has special tokens alone.
    """
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ValueError("it knows no word, since its vocabulary is missing (tokenizer.json); copy the folder again")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, and nothing else that is in its folder, with the permissions of new files.

    The folder may be somebody else's: Python in it would run where the copy is loaded, and a link out of it would
    publish a private file. A file that exists and is equal is left alone; any other is replaced atomically.

    Raises:
        ValueError: a file of the tokenizer is a link to another folder.
    """
    target.mkdir(parents=True, exist_ok=True)
    for item in sorted({item for pattern in FILES for item in source.glob(pattern)}):
        if item.is_dir() or item.suffix == ".py":
            continue
        if not _is_own(item, source):
            raise ValueError(f"{item}: leads out of the folder of its tokenizer; put the file itself there")
        copy = target / item.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists() or not filecmp.cmp(item, copy, shallow=False):
            staging = copy.with_name(f".{copy.name}.staging")
            shutil.copyfile(item, staging)
            staging.replace(copy)


def _is_own(item: Path, source: Path) -> bool:
    """Return whether a path is a file of a folder, or one that the cache of the hub links from there."""
    there, folder = item.resolve(), source.resolve()
    return there.is_file() and (there.is_relative_to(folder) or there.parent == folder.parent.parent / "blobs")


class Encoder:
    """Encode documents with the tokenizer in a folder.

    Attributes:
        vocab_size: Number of ids, the end-of-text token included.
        begins_with: Tokens that the tokenizer puts before a text, such as Llama's <s>; they begin every document.
        eos_token_id: Ends every document.
        dtype: Type in which the ids are stored.
    """

    def __init__(self, folder: Path, spec: str) -> None:
        """Load the tokenizer.

        Args:
            folder: Written by `build_tokenizer`.
            spec: The specification it was built from.

        Raises:
            ValueError: the end-of-text token has no id.
        """
        eos = read_object(folder / CONFIG).get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if not isinstance(eos, str):
            raise ValueError(f"--tokenizer {spec}: {folder / CONFIG}: eos_token = {eos!r}: expected its text")
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" spelled out in a text is ordinary text
        self._bytes_only = spec == "byte"
        eos_token_id = self._tokenizer.token_to_id(eos)
        if eos_token_id is None:
            raise ValueError(f"--tokenizer {spec}: its eos_token {eos!r} is not in its vocabulary; add it there")
        self.eos_token_id: int = eos_token_id
        template = self._tokenizer.encode("a")
        first = takewhile(itemgetter(1), zip(template.ids, template.special_tokens_mask, strict=True))
        # If the end-of-text token also begins a text, the previous document already has one
        self.begins_with = [token for token, _ in first if token != eos_token_id]
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.dtype = token_dtype(self.vocab_size)
        self._tokenizer = _blind_to_special_pieces(self._tokenizer)

    def encode(self, text: str, begins: bool = True, ends: bool = True) -> Integers:
        """Return the ids [length] of one document, with its beginning and end-of-text tokens.

        Args:
            text: The document, or a part of one.
            begins: Whether the document begins here.
            ends: Whether the document ends here.
        """
        first = self.begins_with if begins else []
        if self._bytes_only:  # the same ids, about 800 times faster
            ids: Any = np.frombuffer(text.encode(), np.uint8)
        else:
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        tokens = np.empty(len(first) + len(ids) + ends, self.dtype)
        tokens[: len(first)] = first
        tokens[len(first) : len(first) + len(ids)] = ids
        tokens[len(first) + len(ids) :] = self.eos_token_id
        return tokens

    def what_changes(self, text: str) -> str | None:
        """Return where a text first differs from its decoded tokens, or None if it does not."""
        if self._bytes_only:
            return None
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        back = self._tokenizer.decode(ids, skip_special_tokens=False)
        if back == text:
            return None
        at = next((n for n, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
        return f"{text[at : at + 20]!r} comes back as {back[at : at + 20]!r}"


def _blind_to_special_pieces(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that reads the name of a special token as text even if its Unigram model has a piece for it.

    SentencePiece never matches the names of such pieces, </s> or <pad>; the tokenizers library does.
    """
    facts = json.loads(tokenizer.to_str())
    special = {token["content"] for token in facts["added_tokens"] if token["special"]}
    if facts["model"]["type"] != "Unigram" or special.isdisjoint(piece for piece, _ in facts["model"]["vocab"]):
        return tokenizer
    # A piece's position is its id, so the piece stays, under a name that occurs in no text
    facts["model"]["vocab"] = [
        [f"\0{piece}" if piece in special else piece, score] for piece, score in facts["model"]["vocab"]
    ]
    facts["added_tokens"] = [token for token in facts["added_tokens"] if not token["special"]]
    blind = Tokenizer.from_str(json.dumps(facts))
    blind.encode_special_tokens = True
    return blind


class Decoder:
    """Turn token ids back into text with the tokenizer in a folder; special tokens appear by name."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(folder)

    @cached_property
    def is_bytes(self) -> bool:
        """Return whether the ids below 256 are the bytes, and no other id decodes to text."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        return vocabulary == byte_vocabulary()

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, with U+FFFD for bytes that form no character."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def pieces(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each piece, computed on all cores."""
        return self._tokenizer.decode_batch(pieces, skip_special_tokens=False)


class TextBytes:
    """Count the UTF-8 bytes of the text that tokens stand for; special tokens stand for none."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer in a folder."""
        self._tokenizer = load_tokenizer(folder)
        self._of_id = _bytes_of_ids(json.loads(self._tokenizer.to_str()))

    def count(self, tokens: Integers, lengths: Int64s) -> int:
        """Return the bytes of n documents.

        Args:
            tokens: [sum of lengths]: the documents, concatenated.
            lengths: [n]: tokens of each.
        """
        if self._of_id is not None:
            return int(self._of_id[tokens].sum())
        pieces = [piece.tolist() for piece in np.split(tokens, np.cumsum(lengths)[:-1])]
        return sum(len(text.encode()) for text in self._tokenizer.decode_batch(pieces, skip_special_tokens=True))


def _bytes_of_ids(facts: dict[str, Any]) -> Int64s | None:
    """Return the bytes of every id [vocab_size], or None if those of an id depend on its neighbours."""
    if (facts["decoder"] or {}).get("type") != "ByteLevel":
        return None
    size = {id_: len(piece) for piece, id_ in facts["model"]["vocab"].items()}  # a character stands for a byte
    size |= {each["id"]: 0 if each["special"] else len(each["content"].encode()) for each in facts["added_tokens"]}
    table = np.zeros(max(size) + 1, np.int64)
    table[list(size)] = list(size.values())
    return table


def byte_vocabulary() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte: itself if visible, else the next character from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return {chr(byte if byte in visible else next(hidden)): byte for byte in range(256)}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in a folder.

    Raises:
        DamagedFileError: its file is not a tokenizer.
    """
    with reading(folder / TOKENIZER):
        return Tokenizer.from_file(str(folder / TOKENIZER))


def tokenizer_sha256(folder: Path) -> str:
    """Return the hash of tokenizer.json, which identifies a tokenizer."""
    return hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
