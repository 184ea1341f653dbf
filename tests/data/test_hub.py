"""Whether the hub answers is known in seconds, also where somebody takes the call and says nothing."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from plumbline.data import hub


class Forbidding(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(403)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


def test_any_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Forbidding) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub.is_reachable()
        hub.is_reachable.cache_clear()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not hub.is_reachable(), "nobody is asked"
        server.shutdown()


def test_silence_and_refusal_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert not hub.is_reachable()
    hub.is_reachable.cache_clear()
    assert not hub.is_reachable(), "nobody listens any more"
