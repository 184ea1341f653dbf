"""Corpora in stores of other protocols: Google's by its emulator, Hugging Face's by what answers as the hub does.

`gs://` needs `pip install gcsfs gcp-storage-emulator`, and is skipped without.
"""

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec
import pytest

from plumbline.data.corpus import open_corpus
from plumbline.data.indexed import BLOCK_BYTES
from plumbline.data.preparation.upload import prepare_at
from plumbline.data.preparation.verifying import verify
from plumbline.data.prepare import Request
from plumbline.data.remote import fetch
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.remote.fetch import RemoteError
from plumbline.data.sources import Sources
from plumbline.launcher.runtime.ranks.world import free_port
from tests.data.test_remote import blocky, config, read  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no file system of another test answer, and nobody wait."""
    monkeypatch.setattr(fetch, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(fetch, "LONGEST_WAIT", 0.01)
    fetch._file_system.cache_clear()
    yield
    fetch._file_system.cache_clear()


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """Run Google's storage, in memory; give what writes to it."""
    gcsfs = pytest.importorskip("gcsfs", reason="pip install gcsfs gcp-storage-emulator")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcsfs gcp-storage-emulator")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield gcsfs.GCSFileSystem()
    server.stop()
    gcsfs.GCSFileSystem.clear_instance_cache()


def test_gs(gs: fsspec.AbstractFileSystem, text_folder: Path, blocky: Path, tmp_path: Path) -> None:  # noqa: F811
    request = Request(Sources((str(text_folder),)), "byte", Path(), 0.2, shard_bytes=10_000)
    url = "gs://bucket/corpora/c"
    prepare_at(url, request, tmp_path / "c")
    assert verify(url)[1] == []
    assert prepare_at(url, request, tmp_path / "c").seconds is None  # it is there
    prepare_at(url, replace(request, shard_bytes=20_000, overwrite=True), tmp_path / "d")
    assert verify(url)[1] == []
    gs.put(f"{blocky}/", "bucket/blocky/", recursive=True)
    assert read(config("gs://bucket/blocky", tmp_path / "cache"), 3, 9) == read(config(str(blocky), tmp_path), 3, 9)
    pairs = config("gs://bucket/blocky/train-*", tmp_path / "cache")
    assert read(pairs, 0, 3) == read(config(str(blocky / "train-*"), tmp_path), 0, 3)
    gs.rm("bucket/blocky/train-00001.bin")
    with pytest.raises(RemoteError, match=r"gs://bucket/blocky/train-00001\.bin: no such file"):
        read(config("gs://bucket/blocky", tmp_path / "other"))


class Hub(BaseHTTPRequestHandler):
    """Answer as the hub does for the data set me/corpora, which is a folder."""

    protocol_version = "HTTP/1.1"
    folder: Path
    ranges: set[tuple[int, int]]

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/api/datasets/me/corpora/paths-info/main"
        self._answer([self._entry(self.folder / name) for name in body["paths"] if (self.folder / name).exists()])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/me/corpora/tree/main"):
            there = self.folder / path.removeprefix("/api/datasets/me/corpora/tree/main").strip("/")
            if there.is_dir():
                self._answer([self._entry(each) for each in there.iterdir()])
            else:
                self._nothing("EntryNotFound")
        elif path.startswith("/api/datasets/me/corpora"):
            self._answer({"id": "me/corpora", "sha": "0" * 40})
        elif path.startswith("/datasets/me/corpora/resolve/main/"):
            data = (self.folder / path.removeprefix("/datasets/me/corpora/resolve/main/")).read_bytes()
            if part := self.headers.get("Range"):
                first, last = map(int, part.removeprefix("bytes=").split("-"))
                self.ranges.add((first, last))
                self._send(data[first : last + 1], 206)
            else:
                self._send(data, 200)
        else:
            self._nothing("RepoNotFound")

    def _entry(self, path: Path) -> dict[str, object]:
        name, kind = str(path.relative_to(self.folder)), "directory" if path.is_dir() else "file"
        return {"type": kind, "path": name, "oid": f"{path.stat().st_mtime_ns:040}", "size": path.stat().st_size}

    def _answer(self, found: object) -> None:
        self._send(json.dumps(found).encode(), 200)

    def _nothing(self, code: str) -> None:
        self._send(b"{}", 404, code)

    def _send(self, data: bytes, status: int, code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data)


def test_hf(sharded: Path, blocky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name, corpus in (("sharded", sharded), ("blocky", blocky)):
        (tmp_path / "repo").mkdir(exist_ok=True)
        (tmp_path / "repo" / name).symlink_to(corpus)
    ranges = set[tuple[int, int]]()
    handler = type("Handler", (Hub,), {"folder": tmp_path / "repo", "ranges": ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": f"http://127.0.0.1:{server.server_port}"})
        url = "hf://datasets/me/corpora"
        assert read(config(f"{url}/sharded", tmp_path / "cache")) == read(config(str(sharded), tmp_path))
        assert read(config(f"{url}/blocky", tmp_path / "cache"), 3, 9) == read(config(str(blocky), tmp_path), 3, 9)
        assert {(0, BLOCK_BYTES - 1), (BLOCK_BYTES, 2 * BLOCK_BYTES - 1)} <= ranges
        assert all(last - first < BLOCK_BYTES for first, last in ranges), "and nothing that nobody asked for"
        pairs = config(f"{url}/sharded/train-*", tmp_path / "cache")
        assert read(pairs) == read(config(str(sharded / "train-*"), tmp_path))
        with pytest.raises(ValueError, match=r"hf://datasets/me/corpora/typo: no \.idx file here"):
            open_corpus(f"{url}/typo", CacheConfig(path=str(tmp_path / "cache")))
        server.shutdown()
