"""Fetch bytes by fsspec: every read has a time-out, what fails is tried again later, what arrives is checked.

Credentials are found by fsspec's usual means (environment, files of the providers, fsspec's own configuration) and are
no part of a URL: `paths.check_url` refuses one that holds some, so that none is logged or written into a run folder.
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
"""Requests for the same bytes before a run gives up: with the waits between them, about a minute without time-outs."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between the first two tries, which double from then on, up to the second number."""
READ_SECONDS = 60.0
"""Time-out of one read of at most `BLOCK_BYTES`."""
WRONG = 3
"""Downloads of the same bytes with a wrong checksum before a run gives up."""

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
"""Protocol -> package that speaks it; others are named by fsspec's own message."""
FINAL_STATUS = {400, 401, 403, 404, 405, 410, 416}
"""HTTP answers that will be the same next time."""
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
"""What botocore raises, which need not be installed, where nobody gave it any."""
VERSIONS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "blob_id")
"""What servers and fsspec call that which changes when a file does, the surest first."""


class RemoteError(OSError):
    """State that a remote file cannot be had."""


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, one for each process, and the path in it.

    Raises:
        RemoteError: the package that speaks the protocol is missing, or refuses to start.
    """
    protocol = url.partition("://")[0]
    try:
        fs = _file_system(os.getpid(), protocol, url.split("/")[2])
    except ImportError as error:
        package = PACKAGES.get(protocol, "aiohttp" if protocol.startswith("http") else None)
        remedy = f"pip install {package}" if package else str(error)
        raise RemoteError(f"{url}: {protocol}:// needs a package that is not installed: {remedy}") from error
    except Exception as error:  # of any of many packages: unknown protocols, credentials that are half there
        raise RemoteError(f"{url}: cannot be opened ({_describe(error)})") from error
    return fs, fs._strip_protocol(url)


@lru_cache(maxsize=64)
def _file_system(_process: int, protocol: str, place: str) -> Any:
    """Make a file system; a forked process makes its own, since threads of the parent's are not there."""
    import fsspec.core  # slow to import, and only needed here

    return fsspec.core.url_to_fs(f"{protocol}://{place}/x", use_listings_cache=False)[0]


def call(url: str, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of the file system of a URL with its path, under the time-out where it knows one."""
    from fsspec.asyn import AsyncFileSystem  # slow to import, and only needed here

    fs, path = file_system(url)
    if isinstance(fs, AsyncFileSystem) and fs.async_impl:
        options["timeout"] = READ_SECONDS
    elif method == "cat_file":
        options["cache_type"] = "none"  # else megabytes are fetched that lie behind what is asked for
    return getattr(fs, method)(path, *arguments, **options)


def again(url: str, what: str, ask: Callable[[], Any], tries: int) -> Any:
    """Ask until there is an answer, waiting longer each time.

    Raises:
        FileNotFoundError: there is no such file.
        RemoteError: the last try failed as well, or the answer is final; names URL, error and remedy.
    """
    for attempt in range(1, tries + 1):
        try:
            return ask()
        except RemoteError:
            raise
        except Exception as raised:  # of any of many packages; which may pass is told by PermissionError and status
            error = _reason(raised)
            if isinstance(error, FileNotFoundError):
                raise
            final = (
                isinstance(error, PermissionError)
                or getattr(error, "status", None) in FINAL_STATUS
                or type(error).__name__ in NO_CREDENTIALS
            )
            if final or attempt == tries:
                count = "" if final or tries == 1 else f" in {tries} tries"
                raise RemoteError(
                    f"{url}: {what} could not be read{count} ({_describe(error)}); check the address, the network and "
                    "the credentials, then start the same command again"
                ) from raised
            wait = wait_before(attempt)
            LOG.warning(f"{url}: {what}: {_describe(error)}; try {attempt + 1} of {tries} in {wait:.1f} s")
            time.sleep(wait)
    raise AssertionError("unreachable: the last try returns or raises")


def wait_before(attempt: int) -> float:
    """Return the seconds to wait after so many failures, drawn so that many processes do not come back at once."""
    # Not the generator that a run seeds, nor one that forked processes have in common
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (attempt - 1)) * random.SystemRandom().uniform(0.5, 1.0)


def read(piece: Piece, start: int, stop: int, tries: int = TRIES) -> bytes:
    """Return some of the bytes of a piece.

    Raises:
        RemoteError: they cannot be had.
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


def download(piece: Piece, file: BinaryIO, tries: int = TRIES) -> None:
    """Write a piece into a file and check it, block by block in little memory.

    Raises:
        RemoteError: it cannot be had, or never has the checksum that it must have.
    """
    for attempt in range(1, WRONG + 1):
        file.seek(0)
        digest = xxhash.xxh3_64()
        for start in range(piece.start, piece.stop, BLOCK_BYTES):
            data = read(piece, start, min(start + BLOCK_BYTES, piece.stop), tries)
            digest.update(data)
            file.write(data)
        actual = digest.hexdigest()
        if piece.checksum in (None, actual):
            return
        LOG.warning(f"{piece}: checksum {actual} where {piece.checksum} is expected (download {attempt} of {WRONG})")
    raise RemoteError(
        f"{piece}: {WRONG} downloads had the right length and wrong bytes, the last with checksum {actual} where the "
        f"corpus's manifest expects {piece.checksum}; the file is damaged there: copy the corpus to the server again"
    )


def facts(url: str) -> tuple[int, str | None]:
    """Return the size of a remote file, and what changes when the file does, None where nobody says.

    Raises:
        FileNotFoundError: there is no such file.
        RemoteError: the server does not answer, or does not tell the size.
    """
    info = again(url, "its size", lambda: call(url, "info"), TRIES)
    size = info.get("size")
    if not isinstance(size, int):
        raise RemoteError(f"{url}: the server does not tell how long the file is; serve the corpus by one that does")
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), None)
    return size, version


def _reason(error: Exception) -> BaseException:
    """Return what is behind an error: fsspec says of whatever an HTTP server answers that there is no such file."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    silent = isinstance(cause, TimeoutError | ConnectionError) or type(cause).__module__.startswith("aiohttp")
    status = getattr(cause, "status", None)
    return error if status in (404, 410) or (status is None and not silent) else cause


def _describe(error: BaseException) -> str:
    """Return an error in one short line, without the query of a URL, which may be a signature."""
    status = getattr(error, "status", None)
    text = str(error).strip().partition("\n")[0] or "no answer in time" * ("Timeout" in type(error).__name__)
    words = [type(error).__name__, *([f"status {status}"] if status else []), *([text] if text else [])]
    return re.sub(r"\?\S*", "", ": ".join(words))[:300]
