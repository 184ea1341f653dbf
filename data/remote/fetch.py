"""Fetch bytes with fsspec: reads have a time-out, failures are retried, and downloads are verified.

Credentials are found by fsspec's usual means (environment, files of the providers, fsspec's own configuration) and are
never part of a URL: `paths.check_url` refuses one that contains any, so that none is logged or written into a run
folder.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

import xxhash

from plumbline.data.indexed import BLOCK_BYTES
from plumbline.data.remote.piece import Piece

LOG = logging.getLogger(__name__)

TRIES = 8
"""Requests for the same bytes before a run gives up: about a minute including the waits, without time-outs."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between the first two tries, doubled after each further try up to the second number."""
READ_SECONDS = 60.0
"""Time-out of one read of at most `BLOCK_BYTES`."""
WRONG = 3
"""Downloads of the same bytes with wrong checksums before a run gives up."""

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
"""Protocol -> the package that implements it; fsspec's own message names the others."""
FINAL_STATUS = {400, 401, 404, 405, 410, 416}
"""HTTP status codes that a retry will not change, besides 403."""
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
"""Errors of botocore, which need not be installed, if there are no credentials."""
VERSIONS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "blob_id")
"""Names in servers and fsspec for a value that changes with the file, the most reliable first."""


class RemoteError(OSError):
    """State that a remote file cannot be fetched."""


class RefusedError(RemoteError):
    """State that a server refuses a file, as some do with one that is missing (S3 to whoever may not list)."""


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, one per process, and the path in it.

    Raises:
        RemoteError: the package for the protocol is missing or fails to start.
    """
    protocol, _, rest = url.partition("://")
    protocol = protocol.lower()  # fsspec knows no other
    try:
        fs = _file_system(os.getpid(), protocol, url.split("/")[2])
    except ImportError as error:
        package = PACKAGES.get(protocol, "aiohttp" if protocol.startswith("http") else None)
        remedy = f"pip install {package}" if package else str(error)
        raise RemoteError(f"{url}: {protocol}:// needs a package that is not installed: {remedy}") from error
    except Exception as error:  # from any of many packages: unknown protocols, incomplete credentials
        raise RemoteError(f"{url}: cannot be opened ({_describe(error)})") from error
    return fs, fs._strip_protocol(f"{protocol}://{rest}")


@lru_cache(maxsize=64)
def _file_system(_process: int, protocol: str, place: str) -> Any:
    """Make a file system; a forked process makes its own, since it lacks the parent's threads."""
    import fsspec.core  # slow to import, and only needed here

    return fsspec.core.url_to_fs(f"{protocol}://{place}/x", use_listings_cache=False)[0]


def call(url: str, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of a URL's file system with its path, with a time-out if it supports one."""
    from fsspec.asyn import AsyncFileSystem  # slow to import, and only needed here

    fs, path = file_system(url)
    if isinstance(fs, AsyncFileSystem) and fs.async_impl:
        options["timeout"] = READ_SECONDS
    elif method == "cat_file":
        options["cache_type"] = "none"  # else megabytes beyond the requested range are fetched
    return getattr(fs, method)(path, *arguments, **options)


def again(url: str, what: str, ask: Callable[[], Any], tries: int) -> Any:
    """Call `ask` until it succeeds, waiting longer each time.

    Raises:
        FileNotFoundError: there is no such file.
        RefusedError: the server refuses it, or it is missing from one that does not say so.
        RemoteError: the last try failed as well, or the answer is final; names URL, error and remedy.
    """
    for attempt in range(1, tries + 1):
        try:
            return ask()
        except RemoteError:
            raise
        except Exception as raised:  # from any of many packages; PermissionError and the status tell whether to retry
            error = _reason(raised)
            if isinstance(error, FileNotFoundError):
                raise
            status = getattr(error, "status", None)
            refused = isinstance(error, PermissionError) or status == 403
            final = refused or status in FINAL_STATUS or type(error).__name__ in NO_CREDENTIALS
            if final or attempt == tries:
                count = "" if final or tries == 1 else f" in {tries} tries"
                missing = " (some servers answer this for a file that is missing)" if refused else ""
                raise (RefusedError if refused else RemoteError)(
                    f"{url}: {what} could not be read{count} ({_describe(error)}){missing}; check the address, the "
                    "network and the credentials, then start the same command again"
                ) from raised
            wait = wait_before(attempt)
            LOG.warning(f"{url}: {what}: {_describe(error)}; try {attempt + 1} of {tries} in {wait:.1f} s")
            time.sleep(wait)
    raise AssertionError("unreachable: the last try returns or raises")


def wait_before(attempt: int) -> float:
    """Return the seconds to wait after `attempt` failures, randomised so that processes do not retry in lockstep."""
    # Neither the generator that a run seeds, nor one that forked processes share
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (attempt - 1)) * random.SystemRandom().uniform(0.5, 1.0)


def read(piece: Piece, start: int, stop: int, tries: int = TRIES) -> bytes:
    """Return bytes [start, stop) of a piece.

    Raises:
        RemoteError: they cannot be fetched.
    """

    def ask() -> bytes:
        whole = stop - start == piece.file_size
        data: bytes = call(piece.url, "cat_file") if whole else call(piece.url, "cat_file", start=start, end=stop)
        if len(data) == stop - start:
            return data
        if len(data) == piece.file_size:
            raise RemoteError(
                f"{piece.url}: the server sends all {piece.file_size:,} bytes where {stop - start:,} of them are asked "
                "for; serve the corpus by one that knows ranges, or copy it to a local folder"
            )
        raise OSError(f"{len(data):,} bytes came instead of {stop - start:,}")

    try:
        data: bytes = again(piece.url, f"bytes {start:,} to {stop:,}", ask, tries)
    except FileNotFoundError as error:
        raise RemoteError(f"{piece.url}: no such file; copy the corpus there again") from error
    return data


def download(piece: Piece, file: BinaryIO, tries: int) -> None:
    """Download a piece into a file and verify it, block by block in little memory.

    Raises:
        RemoteError: it cannot be fetched, repeatedly has a wrong checksum, or has none and the file was replaced.
    """
    for attempt in range(1, WRONG + 1):
        file.seek(0)
        digest = xxhash.xxh3_64()
        for start in range(piece.start, piece.stop, BLOCK_BYTES):
            data = read(piece, start, min(start + BLOCK_BYTES, piece.stop), tries)
            digest.update(data)
            file.write(data)
        actual = digest.hexdigest()
        if piece.checksum is None:
            _check_unchanged(piece, tries)
            return
        if actual == piece.checksum:
            return
        LOG.warning(f"{piece}: checksum {actual} where {piece.checksum} is expected (download {attempt} of {WRONG})")
    raise RemoteError(
        f"{piece}: {WRONG} downloads had the right length and wrong bytes, the last with checksum {actual} where the "
        f"corpus's manifest expects {piece.checksum}; the file is damaged there: copy the corpus to the server again"
    )


def _check_unchanged(piece: Piece, tries: int) -> None:
    """Refuse bytes of another version of the file than the piece is named by.

    Raises:
        RemoteError: the file was replaced or removed since, or the server does not answer.
    """
    try:
        now = facts(piece.url, tries)
    except FileNotFoundError:
        now = None
    if now != (piece.file_size, piece.version):
        raise RemoteError(
            f"{piece}: the file was replaced or removed there while it was in use, and has no checksum that would tell "
            "its versions apart; put the earlier one back, or start the same command again once the new one is complete"
        )


def facts(url: str, tries: int = TRIES) -> tuple[int, str | None]:
    """Return the size of a remote file, and a value that changes with the file, or None if there is none.

    Raises:
        FileNotFoundError: there is no such file.
        RemoteError: the server does not answer, or does not state the size.
    """
    info = again(url, "its size", lambda: call(url, "info"), tries)
    size = info.get("size")
    if not isinstance(size, int):
        raise RemoteError(f"{url}: the server does not tell how long the file is; serve the corpus by one that does")
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), None)
    return size, version


def _reason(error: Exception) -> BaseException:
    """Return the cause of an error: fsspec reports any HTTP error as FileNotFoundError."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    silent = isinstance(cause, TimeoutError | ConnectionError) or type(cause).__module__.startswith("aiohttp")
    status = getattr(cause, "status", None)
    return error if status in (404, 410) or (status is None and not silent) else cause


def _describe(error: BaseException) -> str:
    """Describe an error in one short line, without URL queries, which may be signatures."""
    status = getattr(error, "status", None)
    text = str(error).strip().partition("\n")[0] or "no answer in time" * ("Timeout" in type(error).__name__)
    words = [type(error).__name__, *([f"status {status}"] if status else []), *([text] if text else [])]
    return re.sub(r"\?\S*", "", ": ".join(words))[:300]
