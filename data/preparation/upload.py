"""Upload a corpus to a URL: all other files first and corpus.json last, so that a corpus that opens is complete.

It is made in a hidden local folder, which is removed after the upload. The same command resumes a run that failed or
was killed, without sending files again. If a corpus replaces another, its files go into a folder of their own, so that
the old one can be read until `corpus.json` is replaced; then the old one is removed.
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
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from plumbline.data.corpus import read_manifest
from plumbline.data.manifest import MANIFEST, Manifest
from plumbline.data.paths import check_url
from plumbline.data.preparation.manifest import CORPUS, check_same
from plumbline.data.preparation.request import Request
from plumbline.data.preparation.work import whole
from plumbline.data.prepare import Result, prepare
from plumbline.data.remote.fetch import file_system

THREADS = 8
UPLOADED = "uploaded.jsonl"
"""Lists the files that were sent, each with its local modification time."""


def prepare_at(url: str, request: Request, staging: Path) -> Result:
    """Make a corpus and upload it, unless the same one exists already.

    Args:
        url: Where to upload, on any file system of fsspec.
        request: What to make; its output is not used.
        staging: A folder on a disk with room for the corpus meanwhile.

    Raises:
        ValueError: the request cannot be met, or something else is at the URL.
        OSError: a file cannot be read, written or sent; the same command resumes from there.
    """
    started = time.monotonic()
    url = url.rstrip("/")
    remote = _Remote(url)
    there = remote.manifest()
    name = url.rpartition("/")[2]
    folder = staging / f".{name}.{xxhash.xxh3_64_hexdigest(url.encode())[:8]}.upload"
    if there is not None and not request.overwrite:
        request.check()
        check_same(url, there.request, request.identity(request.sources.listed()))
        if folder.is_dir():  # left by an interrupted upload to the same URL
            remote.remove_all_but(there)
            shutil.rmtree(folder)
        return Result(url, there, None)
    journal = folder / UPLOADED
    if there is None and not journal.is_file() and remote.sizes():
        raise ValueError(
            f"--output {url}: exists and is not a corpus (no {MANIFEST}); choose another name, or empty it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    local = _prepared(request, folder / name)
    content = local.manifest.model_dump_json()
    if there is None:
        place = ""
    elif journal.is_file() and there.model_copy(update={"folder": ""}).model_dump_json() == content:
        place = there.folder  # everything was sent, but what it replaced may still exist
    else:
        place = f"generation-{xxhash.xxh3_64_hexdigest(content.encode())}"
    manifest = local.manifest.model_copy(update={"folder": place})
    journal.touch()
    remote.send(folder / name, manifest, journal)
    remote.remove_all_but(manifest)
    shutil.rmtree(folder)
    return Result(url, manifest, time.monotonic() - started)


def _prepared(request: Request, output: Path) -> Result:
    """Make the corpus locally, unless an earlier command did; a different one that it left is replaced."""
    listed = request.sources.listed()
    stale = (output / MANIFEST).is_file() and read_manifest(output).request != request.identity(listed)
    return prepare(replace(request, output=output, overwrite=stale))


class _Remote:
    """Read and write one folder of a file system."""

    def __init__(self, url: str) -> None:
        self._url = url
        check_url(url)
        self._files, self._root = file_system(url)

    def manifest(self) -> Manifest | None:
        """Return the manifest at the URL, if any."""
        try:
            return Manifest.model_validate_json(self._files.cat_file(f"{self._root}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ValueError(
                f"--output {self._url}: holds a {MANIFEST} of something else; choose another name"
            ) from error
        except Exception as error:  # every file system has its own errors
            raise OSError(f"--output {self._url}: cannot be read ({error})") from error

    def sizes(self) -> dict[str, int]:
        """Return the size of every file at the URL, by name."""
        try:
            found = self._files.find(self._root, detail=True) if self._files.exists(self._root) else {}
            return {path.removeprefix(f"{self._root}/"): info["size"] for path, info in found.items()}
        except Exception as error:  # every file system has its own errors
            raise OSError(f"--output {self._url}: cannot be read ({error})") from error

    def send(self, local: Path, manifest: Manifest, journal: Path) -> None:
        """Upload a corpus, its manifest last; files that are in the journal and at the URL are not sent again."""
        files = {str(path.relative_to(local)): path for path in local.rglob("*") if path.is_file()}
        del files[MANIFEST]
        there, sent = self.sizes(), set(journal.read_text().splitlines())
        lock = threading.Lock()

        def send_one(name: str) -> None:
            path, target = files[name], _within(manifest.folder, name)
            line = json.dumps([target, path.stat().st_mtime_ns])
            if line in sent and there.get(target) == path.stat().st_size:
                return
            self._try(target, partial(self._put, path, target))
            with lock, journal.open("a") as file:
                file.write(f"{line}\n")

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(send_one, sorted(files)))
        with whole(journal.with_name(MANIFEST)) as path:
            path.write_text(json.dumps(manifest.model_dump(), indent=2) + "\n")
        self._try(MANIFEST, partial(self._put, journal.with_name(MANIFEST), MANIFEST))

    def remove_all_but(self, manifest: Manifest) -> None:
        """Remove the files of other corpora, replaced or partially sent."""
        kept = {MANIFEST, *(_within(manifest.folder, name) for name in manifest.files)}
        tokenizer = _within(manifest.folder, "tokenizer/")
        for name in self.sizes():
            if CORPUS.owns(Path(name)) and name not in kept and not name.startswith(tokenizer):
                self._try(name, partial(self._files.rm_file, f"{self._root}/{name}"))

    def _put(self, path: Path, name: str) -> None:
        target = f"{self._root}/{name}"
        if isinstance(self._files, LocalFileSystem):  # a bucket has no folders, and `makedirs` would make a bucket
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)
        sent, size = self._files.size(target), path.stat().st_size
        if sent != size:
            raise OSError(f"{sent} of {size} bytes arrived")

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # every file system has its own errors
            raise OSError(
                f"--output {self._url}: {name} could not be written ({type(error).__name__}: {error}); the same "
                "command goes on from here"
            ) from error


def _within(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
