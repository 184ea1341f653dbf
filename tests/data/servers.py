"""Serve a folder over HTTP from this machine, well or badly, and count what is asked for."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SILENCE = 30
"""Seconds that a server says nothing."""

Behaviour = Callable[[str, int], str]
"""(path, how often it was asked for before) -> how to answer: see `_Handler._send`."""


def well(path: str, before: int) -> str:
    return "well"


@dataclass
class Server:
    """Hold a server that runs."""

    url: str
    behaviour: Behaviour = well
    absent: tuple[int, bytes] = (404, b"")
    """Status and body of the answer for a file that is missing."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and range of each GET."""
    closing: threading.Event = field(default_factory=threading.Event)

    def count(self, ending: str) -> Counter[tuple[str, str | None]]:
        """Return how often each part of the files with this ending was asked for."""
        return Counter(asked for asked in self.asked if asked[0].endswith(ending))


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Serve a folder at a free port of the loopback device."""
    handler = type("Handler", (_Handler,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        http.daemon_threads = True
        server = Server(f"http://127.0.0.1:{http.server_port}")
        handler.server_state = server  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            http.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    server_state: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        data = self._data()
        if data is not None:
            self._head(200, len(data))

    def do_GET(self) -> None:
        state, part = self.server_state, self.headers.get("Range")
        before = sum(path == self.path for path, _ in state.asked)
        state.asked.append((self.path, part))
        if (self.folder / self.path[1:]).is_dir():
            names = sorted((path.name for path in (self.folder / self.path[1:]).iterdir()), reverse=True)
            page = "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()
            self._head(200, len(page))
            self.wfile.write(page)
            return
        data = self._data()
        if data is None:
            return
        behaviour = state.behaviour(self.path, before)
        if part is not None and behaviour != "ignores ranges":
            first, last = part.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        self._send(data, behaviour, 200 if part is None else 206)

    def _send(self, data: bytes, behaviour: str, status: int) -> None:
        if behaviour.isdecimal():  # a status that says why there is no answer
            self._head(int(behaviour), 0)
        elif behaviour == "silent":
            if not self.server_state.closing.wait(SILENCE):  # to whoever has no time-out, an end that is no success
                self._head(404, 0)
        elif behaviour in ("breaks-off", "stalls"):
            self._head(status, len(data))
            self.wfile.write(data[: len(data) // 2])
            if behaviour == "stalls":
                self.server_state.closing.wait()
            self.close_connection = True
        elif behaviour == "cuts-short":
            self._head(status, len(data) // 2)
            self.wfile.write(data[: len(data) // 2])
        elif behaviour == "lies":
            self._head(status, len(data))
            self.wfile.write(data[:-1] + bytes([data[-1] ^ 1]))
        elif behaviour == "slow":
            self._head(status, len(data))
            for start in range(0, len(data), 1 + len(data) // 4):
                time.sleep(0.02)
                self.wfile.write(data[start : start + 1 + len(data) // 4])
        else:
            self._head(status, len(data))
            self.wfile.write(data)

    def _data(self) -> bytes | None:
        path = self.folder / self.path[1:]
        if not path.is_file():
            status, page = self.server_state.absent
            self._head(status, len(page))
            if self.command == "GET":
                self.wfile.write(page)
            return None
        return path.read_bytes()

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        path = self.folder / self.path[1:]
        if path.is_file():
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
