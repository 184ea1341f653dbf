"""Cache pieces of remote files in a local folder, shared by all processes and runs, up to a size limit.

    pieces/KEY          a piece, named by what it is: two addresses of one corpus share
    pieces/KEY.partial  one that arrives, locked by who fetches it; what a killed process left is written over
    tokenizers/         of the corpora that were opened
    plans/              what each process needs next (plans.py)
    held                the bytes in pieces/ (shelf.py)
    lock                held while room is made

A piece is renamed to its name once it is complete, checked and on disk. Locks end with the process that holds them. To
make room, the piece needed last is removed: first those that nobody plans to read, least recently used first, then
those that the first process needs after the most steps.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, PositiveInt

from plumbline.data.disk import AWAY, FULL
from plumbline.data.locks import same_file, wait_for
from plumbline.data.paths import HomePath, user_cache
from plumbline.data.remote.fetch import TRIES, RemoteError, download
from plumbline.data.remote.piece import Piece
from plumbline.data.remote.plans import KEY, Plan, needs_of_all
from plumbline.data.remote.shelf import PARTIAL, Shelf

REASONS = {errno.ELOOP: "it is a link", errno.EEXIST: "it is no folder"}
"""What some error numbers mean here."""
NOW = -1
"""Steps until a piece is needed if its reader is waiting: everything else is needed later."""


class CacheConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure where corpora at URLs are cached on this machine."""

    path: HomePath | None = None
    """Folder shared by all processes of a machine, preferably on a local disk. None: plumbline/corpora in the user's
    cache directory ($XDG_CACHE_HOME, else ~/.cache)."""

    max_bytes: PositiveInt = 100_000_000_000
    """Size limit of the folder. What is needed last is removed first."""

    @property
    def folder(self) -> Path:
        """Return the folder."""
        return user_cache() / "corpora" if self.path is None else Path(self.path)


class Cache:
    """Hold pieces of remote files on disk."""

    def __init__(self, config: CacheConfig) -> None:
        self.max_bytes = config.max_bytes
        self._config = config

    @cached_property
    def folder(self) -> Path:
        """Return the folder. Computed lazily: with local corpora, not even a home directory is needed."""
        return self._config.folder.absolute()

    @cached_property
    def _shelf(self) -> Shelf:
        return Shelf(self._pieces, self.folder / "held")

    @property
    def _own(self) -> Path:
        """Return the folder, made if it is missing; refuse another user's, who might put links and tokens there.

        Root may use anybody's, as in a container or on a file system that takes root for nobody.
        """
        with self.usable():
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            user, owners = os.geteuid(), {self.folder.stat().st_uid, self.folder.lstat().st_uid}
        if user != 0 and owners - {0, user}:
            raise self._unusable(self.folder, f"it belongs to user {max(owners - {0, user})}")
        return self.folder

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Turn an error of the file system into one that names the folder and the remedy.

        Raises:
            RemoteError: a file of the folder cannot be made, read or written.
        """
        try:
            yield
        except OSError as error:
            if error.errno is None or error.errno in AWAY:  # one that says what to do, or may pass
                raise
            reason = REASONS.get(error.errno, error.strerror)
            raise self._unusable(error.filename or self.folder, reason) from error

    def _unusable(self, path: object, reason: str | None) -> RemoteError:
        return RemoteError(
            f"data.cache.path = {self.folder}: {path} cannot be written ({reason}); choose another data.cache.path, "
            "one for each user, on a disk that has room"
        )

    @property
    def _pieces(self) -> Path:
        return self._own / "pieces"

    @property
    def _plans(self) -> Path:
        return self._own / "plans"

    def open(self, piece: Piece) -> BinaryIO:
        """Open a piece for reading at its first byte, fetching it if it is not cached.

        Raises:
            RemoteError: it cannot be fetched, or is larger than the cache may be.
        """
        with self.usable():
            file = self._open_kept(piece) or self._obtain(piece, NOW, TRIES)
        assert file is not None, "a piece that is needed now is waited for"
        return file

    def fetch(self, piece: Piece, steps: int) -> bool:
        """Fetch a piece needed in `steps` steps; return False if all pieces that could make room are needed as soon.

        Raises:
            OSError: a single attempt to fetch it failed.
        """
        with self.usable():
            if self._path(piece).exists():
                return True
            file = self._obtain(piece, steps, tries=1)
        if file is not None:
            file.close()
        return file is not None

    def forget(self, piece: Piece) -> None:
        """Remove a piece."""
        with self.usable(), self.locked():
            self._shelf.remove(piece.key)

    def plan(self) -> Plan:
        """Return a new plan for what this process will read."""
        with self.usable():
            return Plan(self._plans)

    @contextlib.contextmanager
    def locked(self, name: str = "lock") -> Iterator[None]:
        """Hold a lock of the folder, which ends with this process at the latest.

        Raises:
            RemoteError: the folder is another user's, or cannot be written.
        """
        with self.usable():
            descriptor = os.open(self._own / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            wait_for(file, KEY, self.folder)
            yield

    def _path(self, piece: Piece) -> Path:
        return self._pieces / piece.key

    def _open_kept(self, piece: Piece) -> BinaryIO | None:
        try:
            file = self._path(piece).open("rb")
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size == piece.size:
            with contextlib.suppress(OSError):  # another user's file
                os.utime(file.fileno())
            return file
        file.close()  # truncated by someone else
        self.forget(piece)
        return None

    def _obtain(self, piece: Piece, steps: int, tries: int) -> BinaryIO | None:
        """Return an open piece once some process has fetched it, or None if there is no room for it."""
        self._pieces.mkdir(parents=True, exist_ok=True)
        final = self._path(piece)
        partial = final.with_name(final.name + PARTIAL)
        while True:
            file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
            wait_for(file, KEY, self.folder)  # or for a process that is already fetching it
            if not same_file(file.fileno(), partial):  # that process succeeded
                file.close()
                if kept := self._open_kept(piece):
                    return kept
                continue
            try:
                if kept := self._open_kept(piece):  # fetched between our check and our lock
                    return self._drop(partial, file, kept)
                if not self._reserve(file, piece, steps):
                    return self._drop(partial, file, None)
                self._fill(piece, file, tries)
            except BaseException:
                self._drop(partial, file, None)
                raise
            with self.locked():  # or who lists the folder to count it might see neither name
                partial.rename(final)
            fcntl.flock(file, fcntl.LOCK_UN)
            file.seek(0)
            return file

    def _drop(self, partial: Path, file: BinaryIO, result: BinaryIO | None) -> BinaryIO | None:
        """Remove an unneeded file while its lock is held."""
        with self.locked():
            self._shelf.remove(partial.name)
        file.close()
        return result

    def _fill(self, piece: Piece, file: BinaryIO, tries: int) -> None:
        try:
            download(piece, file, tries)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise RemoteError(
                f"{self.folder}: no space left on the device for {piece}; free some, lower data.cache.max_bytes "
                f"({self.max_bytes}), or choose another data.cache.path"
            ) from error

    def _reserve(self, file: BinaryIO, piece: Piece, steps: int) -> bool:
        """Make room for a piece and give its file its final size; if it is needed now, wait until others free room."""
        while True:
            with self.locked():
                if self._make_room(piece, steps, os.fstat(file.fileno()).st_size):
                    self._shelf.grow(file, piece.size)
                    return True
            if steps != NOW:
                return False
            time.sleep(0.05)

    def _make_room(self, piece: Piece, steps: int, there: int) -> bool:
        """Remove pieces that are needed later than in `steps` steps, the last first, until a piece fits.

        Args:
            piece: the piece to fetch.
            steps: until it is needed.
            there: bytes that its file already has.

        Raises:
            RemoteError: it can never fit.
        """
        fixed = self._other_bytes()
        if fixed + piece.size > self.max_bytes:
            raise RemoteError(
                f"{piece}: {piece.size:,} bytes do not fit data.cache.max_bytes = {self.max_bytes} (of which {fixed:,} "
                f"hold tokenizers and plans); raise it to several times as much, or make the corpus of smaller shards"
            )
        allowed = self.max_bytes - fixed - piece.size + there
        if self._shelf.held() <= allowed:
            return True
        needs = needs_of_all(self._plans)
        victims: dict[str, int] = {}
        for name, size in chain(self._shelf.unused(needs), self._needed_later(needs, steps)):
            if self._shelf.held() - sum(victims.values()) <= allowed:
                break
            victims[name] = size
        if self._shelf.held() - sum(victims.values()) > allowed:
            return False
        for name in victims:
            self._shelf.remove(name)
        return True

    def _needed_later(self, needs: dict[str, int], steps: int) -> Iterator[tuple[str, int]]:
        """Yield name and size of each piece that is needed later than in `steps` steps, the last first."""
        found = [(-need, *there, name) for name, need in needs.items() if (there := self._shelf.look(name))]
        for need, _, size, name in sorted(found):
            if -need > steps:
                yield name, size

    def _other_bytes(self) -> int:
        """Return the bytes of files that are never removed: tokenizers and plans."""
        folders = (self.folder / "tokenizers", self._plans)
        total = 0
        for path in (path for folder in folders for path in folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
        return total
