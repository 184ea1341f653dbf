"""Find bare Megatron-LM pairs by prefix, folder, glob or list, and open them as one stream.

They are ordered by path, however they were listed.
"""

import contextlib
import glob
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from plumbline.data.indexed import facts_of, file_facts, open_indexed, read_header
from plumbline.data.manifest import MANIFEST
from plumbline.data.paths import check_url, is_url
from plumbline.data.remote.cache import Cache
from plumbline.data.remote.fetch import TRIES, RefusedError, RemoteError, again, call, facts, file_system
from plumbline.data.remote.files import unchecked
from plumbline.data.remote.tokens import RemoteTokens
from plumbline.data.shards import Shards, Tokens

AT_ONCE = 16
"""Remote pairs that are queried at a time."""
WHOLE = "{}: a whole corpus in a list of pairs; give it as a source of its own"
"""Error for a folder with a manifest, of which it holds the held-out pairs as well."""


class NoPairError(ValueError):
    """State that no pairs were found."""


def find_pairs(entries: Sequence[str]) -> list[str]:
    """Return the prefixes of all pairs, sorted.

    Args:
        entries: prefixes (with or without .bin/.idx), folders and globs, here or at URLs.

    Raises:
        NoPairError: an entry has no pair.
        ValueError: the list is empty, names a pair twice, or a corpus with a manifest.
    """
    if not entries:
        raise ValueError("data: path = []: an empty list of pairs; name at least one")
    found: list[str] = []
    known: set[str] = set()
    for entry in entries:
        prefixes = _remote_prefixes(entry) if is_url(entry) else _local_prefixes(entry)
        if not prefixes:
            raise NoPairError(f"{entry}: no .idx file here; give the prefix of a pair, a folder of pairs, or a glob")
        for prefix in prefixes:
            place = prefix if is_url(prefix) else os.path.realpath(f"{prefix}.bin")
            if place in known:
                raise ValueError(f"{entry}: {prefix} is in the list already; name each pair once")
            known.add(place)
        found += prefixes
    return sorted(found)


def _local_prefixes(entry: str) -> list[str]:
    path = Path(entry)
    if (path / MANIFEST).is_file():
        raise ValueError(WHOLE.format(entry))
    if Path(f"{_stem(entry)}.idx").is_file():
        return [_stem(entry)]
    if path.is_dir():
        return _stems([str(file) for file in path.iterdir()])
    return _stems(glob.glob(entry, recursive=True))  # noqa: PTH207 - absolute globs


def _remote_prefixes(entry: str) -> list[str]:
    check_url(entry)
    fs, _ = file_system(entry)
    if glob.has_magic(entry):
        found = again(entry, "the list of its files", lambda: call(entry, "glob"), TRIES)
        return _stems([fs.unstrip_protocol(name) for name in found])
    with contextlib.suppress(FileNotFoundError, RefusedError):
        facts(f"{_stem(entry)}.idx")
        return [_stem(entry)]
    try:
        names = again(entry, "the list of its files", lambda: call(entry.rstrip("/"), "ls", detail=False), TRIES)
    except FileNotFoundError:
        return []
    if any(name.endswith(f"/{MANIFEST}") for name in names):
        raise ValueError(WHOLE.format(entry))
    return _stems([fs.unstrip_protocol(name) for name in names])


def _stems(files: Sequence[str]) -> list[str]:
    """Return the prefixes of the pairs among some files, without duplicates."""
    return sorted({_stem(name) for name in files if name.endswith(".idx")})


def _stem(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx") if path.endswith((".bin", ".idx")) else path


class _Pair(NamedTuple):
    """Hold what is known about a pair before it is read."""

    tokens: int
    documents: int
    checksum: str
    """xxh3-64 of the index, which identifies the pair."""


def open_pairs(prefixes: Sequence[str], cache: Cache) -> tuple[Tokens, list[str]]:
    """Open pairs as one stream; return it and a checksum of each pair's index.

    Raises:
        ValueError: one is incomplete or not a pair.
        RemoteError: a remote one cannot be fetched.
    """

    def open_shard(number: int) -> Tokens:
        prefix = prefixes[number]
        return _open_remote(prefix, cache) if is_url(prefix) else open_indexed(Path(prefix))

    if len(prefixes) == 1 and not is_url(prefixes[0]):
        return open_shard(0), [file_facts(Path(f"{prefixes[0]}.idx")).xxh3_64]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = list(pool.map(lambda prefix: _look(prefix, cache), prefixes))
    checksums = [pair.checksum for pair in pairs]
    if len(prefixes) == 1:
        return open_shard(0), checksums
    name, lengths = f"{prefixes[0]}.bin and {len(prefixes) - 1:,} more", [pair.tokens for pair in pairs]
    return Shards(name, lengths, sum(pair.documents for pair in pairs), open_shard), checksums


def _open_remote(prefix: str, cache: Cache) -> RemoteTokens:
    try:
        return RemoteTokens(cache, unchecked(f"{prefix}.bin"), unchecked(f"{prefix}.idx"))
    except FileNotFoundError as error:
        raise RemoteError(f"{prefix}.bin, {prefix}.idx: no such file; a corpus needs both") from error


def _look(prefix: str, cache: Cache) -> _Pair:
    if is_url(prefix):
        tokens = _open_remote(prefix, cache)
        with cache.open(tokens.index_piece) as file:
            return _Pair(len(tokens), tokens.num_documents, facts_of(file).xxh3_64)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if not data.is_file():
        raise ValueError(f"{data}: no such file; a corpus needs both {index.name} and {data.name}")
    with index.open("rb") as file:
        dtype, _, indices = read_header(file, index)
    return _Pair(data.stat().st_size // dtype.itemsize, indices - 1, file_facts(index).xxh3_64)
