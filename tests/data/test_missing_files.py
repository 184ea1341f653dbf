"""Servers that do not say that a file is missing: they refuse it, or send a page for it."""

from pathlib import Path
from typing import Any

import pytest

from plumbline.data.corpus import open_corpus
from plumbline.data.remote import fetch
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.remote.fetch import RemoteError
from plumbline.launcher.runtime.config.resolve import vocab_size
from tests.data.servers import Server, serve
from tests.data.test_remote import config, read


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


PAGE = b"\n<!DOCTYPE html><title>Not found</title>"


@pytest.mark.parametrize("absent", [(403, b""), (200, PAGE), (200, b"<html></html>")], ids=["403", "page", "html"])
def test_files_that_a_server_lacks_are_left_out(
    absent: tuple[int, bytes], sharded: Path, server: Server, tmp_path: Path
) -> None:
    """By a server that does not say that they are missing, as S3 does not to whoever may not list."""
    server.absent = absent
    remote = config(f"{server.url}/sharded", tmp_path / "cache")
    tokenizer = open_corpus(f"{server.url}/sharded", remote.cache).tokenizer_path
    assert tokenizer is not None
    assert files_of(tokenizer) == files_of(sharded / "tokenizer")
    assert read(remote, 0, 3) == read(config(str(sharded), tmp_path), 0, 3)


def test_a_tokenizer_that_is_refused_halfway_is_an_error(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its credentials end once tokenizer.json has come."""
    call = fetch.call

    def ending(url: str, *arguments: Any, **options: Any) -> Any:
        if "/tokenizer/" in url and server.count("tokenizer/tokenizer.json"):
            raise PermissionError("expired")
        return call(url, *arguments, **options)

    monkeypatch.setattr(fetch, "call", ending)
    with pytest.raises(RemoteError, match=r"/tokenizer\.json: its size .*PermissionError: expired"):
        open_corpus(f"{server.url}/sharded", CacheConfig(path=str(tmp_path)))


def test_settings_of_a_tokenizer_that_are_no_json_are_refused(server: Server, tmp_path: Path) -> None:
    server.absent = 200, b"not found"
    for _ in range(2):  # nor are they kept
        with pytest.raises(
            RemoteError, match=r"/sharded/tokenizer/\w+\.json: is no JSON; .* have the server answer 404"
        ):
            open_corpus(f"{server.url}/sharded", CacheConfig(path=str(tmp_path)))


def test_what_a_server_refuses_may_be_missing(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    for ending in ("bin", "idx"):
        (tmp_path / "web" / f"p.{ending}").write_bytes((sharded / f"train-00000.{ending}").read_bytes())
    expected, cache = read(config(str(tmp_path / "web" / "p"), tmp_path), 0, 3), tmp_path / "cache"
    refused = r"/corpus\.json: its size .* \(some servers answer this for a file that is missing\); check the address"
    with serve(tmp_path) as running:
        running.absent = 403, b""
        for path in ("web", "web/p"):
            data = config(f"{running.url}/{path}", cache)
            assert read(data, 0, 3) == expected
            with pytest.raises(
                RemoteError, match=rf"{path}{refused}.*; or set model.vocab_size, if .*/{path} is pairs"
            ):
                vocab_size(data)
        for path in ("typo", "web/typo"):
            with pytest.raises(RemoteError, match=path + refused):
                open_corpus(f"{running.url}/{path}", CacheConfig(path=str(cache)))
        (tmp_path / "web" / "corpus.json").symlink_to("nowhere")  # it is listed: these may be held-out pairs
        with pytest.raises(RemoteError, match="web" + refused):
            open_corpus(f"{running.url}/web", CacheConfig(path=str(cache)))
        with pytest.raises(ValueError, match=r"/web: a whole corpus in a list of pairs"):
            open_corpus([f"{running.url}/web"], CacheConfig(path=str(cache)))
