"""Say what a corpus folder must hold: the contents of corpus.json."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from plumbline.data.paths import leads_out

MANIFEST = "corpus.json"
SHAPES_THE_SPLIT = ("seed", "validation_fraction")
"""Keys of a corpus's request on which its held-out text depends."""
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""A checksum. It names a file in the cache of remote corpora, so it must not be a path."""


class FileRecord(BaseModel, extra="forbid", frozen=True, strict=True):
    """State what one file of the corpus must be."""

    size: int = Field(ge=0)
    """Size in bytes."""

    xxh3_64: Checksum
    """Checksum, 16 hex digits."""

    blocks: list[Checksum] = []
    """Checksum of each block of 8 MiB, so that a part can be fetched and checked alone. Empty: only the whole has
    one."""


class Counts(BaseModel, extra="forbid", frozen=True, strict=True):
    """Count what is in a split, or in a part of one."""

    documents: int = Field(ge=0)
    """Documents, each ended by one end-of-text token."""

    tokens: int = Field(ge=0)
    """Tokens, end-of-text tokens included."""

    source_bytes: int = Field(ge=0)
    """UTF-8 bytes of source text: the denominator of bits per byte."""


class SplitRecord(Counts, extra="forbid", frozen=True, strict=True):
    """Hold the counts of one split and where its tokens are."""

    shards: list[str] = []
    """Prefixes, relative to the folder, of the pairs that hold the tokens, in order. Empty: one pair, named after the
    split."""


class HeldOutRecord(BaseModel, extra="forbid", frozen=True, strict=True):
    """State which documents are held out, so that documents added later are chosen by the same rule."""

    threshold: str
    """Hex digits: documents whose hash, 64 bits keyed by the seed, is below this are held out whole; all below 2^64."""

    cut_above: float | None
    """Documents of more bytes than this are cut in two; null if none is."""


class TokenizerRecord(BaseModel, extra="forbid", frozen=True, strict=True):
    """State which tokenizer made the tokens."""

    spec: str
    """The tokenizer that was asked for: byte, train-bpe:N, train-unigram:N, a path, or hf:NAME."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hash of tokenizer/tokenizer.json."""


class Manifest(BaseModel, extra="ignore", frozen=True, strict=True):
    """Hold the contents of corpus.json."""

    format_version: Literal[1, 2] = 1
    """Version of this layout; 2 if a split has shards."""

    tokenizer: TokenizerRecord
    """The tokenizer, stored whole in the folder tokenizer/."""

    vocab_size: int = Field(ge=1, le=2**31)
    """Number of token ids, end-of-text included."""

    eos_token_id: int = Field(ge=0)
    """The token that ends each document."""

    begins_with: list[int] = []
    """The tokens that begin each document, if the tokenizer puts any before every text."""

    splits: dict[str, SplitRecord]
    """train and validation; only validation if everything is held out."""

    files: dict[str, FileRecord]
    """Every token file."""

    unigram_entropy: float
    """Nats per token of the validation split under the train split's add-one-smoothed token frequencies: the score of a
    model that ignores context, which training must beat. ln vocab_size without a train split."""

    request: dict[str, Any]
    """The arguments of the prepare command that shape the corpus, and a fingerprint of the source it read."""

    source_files: list[str] = []
    """For each file that was read, a hash of its path, size, time and the fields read, so that none is appended or
    merged twice. Empty in corpora of more than 50,000 files."""

    skipped: dict[str, int]
    """Documents left out, by reason."""

    versions: dict[str, str]
    """Versions of the libraries that made the corpus."""

    held_out: HeldOutRecord | None = None
    """By which rule; null if not by one: of token files, and of merged corpora with different rules."""

    sources: dict[str, dict[str, Counts]] = {}
    """Counts of each split by source, as the sources were named."""

    folder: str = Field(default="", pattern=r"^(generation-[0-9a-f]{16})?$")
    """Folder within this one that holds the token files and the tokenizer, if a corpus at a URL replaced another, which
    stayed readable until then. Empty: they are beside this file."""

    bad_records: list[str] = []
    """The first damaged records that were left out: file, line or row, and what is wrong."""

    @model_validator(mode="after")
    def _check(self) -> "Manifest":
        if not self.splits.keys() & {"train", "validation"}:
            raise ValueError(f"splits = {', '.join(self.splits) or 'none'}: neither train nor validation is there")
        shards = (name for split in self.splits.values() for name in split.shards)
        for name in (*self.files, *self.splits, *shards):
            if leads_out(name):
                raise ValueError(f"{name}: names a file outside of the corpus")
        if self.eos_token_id >= self.vocab_size:
            raise ValueError(f"eos_token_id = {self.eos_token_id} is beyond vocab_size = {self.vocab_size}")
        return self

    @property
    def held_out_by(self) -> list[Any]:
        """Return what decides which text is held out: corpora that agree in it hold out the same."""
        return [self.held_out, *(self.request.get(key) for key in SHAPES_THE_SPLIT)]


def parse_without_blocks(data: bytes) -> Manifest:
    """Parse a manifest, and keep no checksum of a block: there are millions in one of a trillion tokens.

    They go while the rest is parsed, for memory that lies between what stays is not given back.

    Raises:
        ValueError: not JSON, or a fact is missing or of the wrong type.
    """
    return Manifest.model_validate(json.loads(data, object_hook=_without_blocks))


def _without_blocks(found: dict[str, Any]) -> dict[str, Any]:
    if "xxh3_64" in found:
        found.pop("blocks", None)
    return found
