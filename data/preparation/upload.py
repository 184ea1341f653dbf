"""Put a corpus where a URL says: every file first, corpus.json last, so that a corpus that opens is whole.

It is made in a hidden folder here, which goes when it is uploaded. A run that fails or is killed is gone on with by the
same command: what is there already is not sent again.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from plumbline.data.corpus import MANIFEST, Manifest
from plumbline.data.preparation.manifest import check_same
from plumbline.data.preparation.request import Request
from plumbline.data.prepare import Result, prepare
from plumbline.data.remote.fetch import check_url, file_system

THREADS = 8
UPLOADED = "uploaded.jsonl"


def prepare_at(url: str, request: Request, staging: Path) -> Result:
    """Make a corpus and upload it, unless the same one is there already.

    Args:
        url: Where to, in any file system that fsspec knows.
        request: States what to make; its output is not used.
        staging: A folder on a disk that has room for it meanwhile.

    Raises:
        ValueError: the request cannot be met, or something else is at the URL.
        OSError: a file cannot be read, written or sent; the same command goes on from there.
    """
    started = time.monotonic()
    url = url.rstrip("/")
    remote = _Remote(url)
    there = remote.manifest()
    if there is not None and not request.overwrite:
        request.check()
        check_same(url, there.request, request.identity())
        return Result(url, there, None)
    name = url.rpartition("/")[2]
    folder = staging / f".{name}.{xxhash.xxh3_64_hexdigest(url.encode())[:8]}.upload"
    journal = folder / UPLOADED
    if there is None and not journal.is_file() and remote.holds_something():
        raise ValueError(
            f"--output {url}: exists and is not a corpus (no {MANIFEST}); choose another name, or empty it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    local = prepare(replace(request, output=folder / name))
    journal.touch()
    remote.send(folder / name, journal, there)
    shutil.rmtree(folder)
    return Result(url, local.manifest, time.monotonic() - started)


class _Remote:
    """Read and write one folder of a file system."""

    def __init__(self, url: str) -> None:
        self._url = url
        check_url(url)
        self._files, self._root = file_system(url)

    def manifest(self) -> Manifest | None:
        """Return the manifest that is there, if any."""
        try:
            return Manifest.model_validate_json(self._files.cat_file(f"{self._root}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ValueError(
                f"--output {self._url}: holds a {MANIFEST} of something else; choose another name"
            ) from error
        except Exception as error:  # every file system has errors of its own
            raise OSError(f"--output {self._url}: cannot be read ({error})") from error

    def holds_something(self) -> bool:
        """Return whether there is anything at the URL."""
        try:
            return bool(self._files.exists(self._root) and self._files.find(self._root))
        except Exception as error:  # every file system has errors of its own
            raise OSError(f"--output {self._url}: cannot be read ({error})") from error

    def send(self, local: Path, journal: Path, replaced: Manifest | None) -> None:
        """Upload a corpus; files that the journal names are there already."""
        names = sorted(str(path.relative_to(local)) for path in local.rglob("*") if path.is_file())
        names.remove(MANIFEST)
        checksum = xxhash.xxh3_64_hexdigest((local / MANIFEST).read_bytes())
        done = _read_journal(journal, checksum)
        lock = threading.Lock()

        def send_one(name: str) -> None:
            self._try(name, partial(self._put, local / name, name))
            with lock, journal.open("a") as file:
                file.write(json.dumps([checksum, name]) + "\n")

        if replaced is not None and not done:  # what is replaced must not open while it is neither
            self._try(MANIFEST, partial(self._files.rm_file, f"{self._root}/{MANIFEST}"))
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(send_one, [name for name in names if name not in done]))
        self._try(MANIFEST, partial(self._put, local / MANIFEST, MANIFEST))
        for name in sorted(set(replaced.files if replaced else ()) - set(names)):
            self._try(name, partial(self._files.rm_file, f"{self._root}/{name}"))

    def _put(self, path: Path, name: str) -> None:
        self._files.put_file(str(path), f"{self._root}/{name}")
        sent, size = self._files.size(f"{self._root}/{name}"), path.stat().st_size
        if sent != size:
            raise OSError(f"{sent} of {size} bytes arrived")

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # every file system has errors of its own
            raise OSError(
                f"--output {self._url}: {name} could not be written ({type(error).__name__}: {error}); the same "
                "command goes on from here"
            ) from error


def _read_journal(journal: Path, checksum: str) -> set[str]:
    """Return the files of this very corpus that were uploaded; a last line that was cut off counts for nothing."""
    done = set()
    for line in journal.read_text().splitlines() if journal.is_file() else ():
        try:
            of, name = json.loads(line)
        except ValueError:
            continue
        if of == checksum:
            done.add(name)
    return done
