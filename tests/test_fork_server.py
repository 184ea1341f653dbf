"""What tests start processes by hears of every end, also one that comes at once."""

import socket
from pathlib import Path
from threading import Thread

from tests.fork_server import Forked


def test_an_end_that_comes_with_the_number_is_heard(tmp_path: Path) -> None:
    """A process that refuses its command line may have ended before anybody has read which one it is."""

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not connection.recv(1 << 16).endswith(b"\n"):
                pass
            connection.sendall(b"123\n2\n")
            connection.recv(1)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        server = Thread(target=answer, args=(listener,), daemon=True)
        server.start()
        forked = Forked(tmp_path / "s", ["script.py"], tmp_path, {}, tmp_path / "out", tmp_path / "err")
        assert forked.pid == 123
        assert forked.wait(timeout=10) == 2
        server.join(timeout=10)
        assert not server.is_alive()
