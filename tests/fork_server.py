"""Start scripts in processes that need not import torch and DeepSpeed again: forks of one that has.

    fork_server.py SOCKET OWNER MODULE ...      import the modules; serve at SOCKET until the process OWNER is gone

A training of a few steps takes nine seconds of processor time in a new interpreter, of which all but half a second are
imports. Here one interpreter imports them; each request makes it fork a process that runs a script as `__main__`, with
an environment, a folder and output files of its own, and that ends as any interpreter does, but for its modules. The
rest of a process is its own: signals, collectives, exit codes. What a fork cannot show is that a script finds its
imports by itself, how it takes them apart at its end, and string hashes that differ between ranks: tests that are about
a start, and some of every kind, ask for a new interpreter.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

# What the verbs import, sooner or later
IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.pyplot",
    "plumbline.launcher.runtime.engine.make",
    "plumbline.launcher.runtime.train.loop",
    "scipy.optimize",
    "scipy.stats",
    "sentencepiece",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
)
BASE = "PLUMBLINE_FORK_SERVER"
"""Environment variable with the socket of a server that has imported nothing of ours."""
ALIVE_INTERVAL = 2.0
"""Seconds between two looks at the owner."""


def main() -> None:
    """Import, then fork for each request; in a fork, run the script and leave through the end of this file."""
    place, owner, *modules = sys.argv[1:]
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # DeepSpeed imports it where it is, and it starts a thread
    # Some releases of numpy and pyarrow start threads when they are imported
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    for module in modules:
        importlib.import_module(module)
    del sys.modules["mlflow"]
    threads = threads_of_imports()
    assert threads == 1, f"{threads} threads after imports: a fork would have one of them and the locks of all"
    torch = sys.modules.get("torch")
    usable = torch is None or not (torch.cuda.is_initialized() or fork_is_bad(torch))
    assert usable, "an import has initialized CUDA, which no fork can use"
    gc.freeze()  # or each fork would copy, in order to collect, what it shares with this process
    request = serve(place, int(owner))
    if request is not None:
        become(request)


def threads_of_imports() -> int:
    """Return the threads of this process, but for the one that counting GPUs by NVML starts: forks can use a GPU."""
    names = [Path(f"/proc/self/task/{thread.id}/comm").read_text() for thread in psutil.Process().threads()]
    return sum(not name.startswith("cuda") for name in names)


def fork_is_bad(torch: Any) -> bool:
    """Return whether a fork of this process cannot use a GPU: to count them may initialize CUDA unknown to torch."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def serve(place: str, owner: int) -> dict[str, Any] | None:
    """Answer requests. Returns None to the server, once its owner is gone, and to each fork its request."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen(64)
        Path(f"{place}.new").rename(place)  # it is there when it answers
        while psutil.pid_exists(owner):
            with contextlib.suppress(ChildProcessError):  # guards that have ended, or none at all
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not select.select([listener], [], [], ALIVE_INTERVAL)[0]:
                continue
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    return guard(connection)
    return None


def guard(connection: socket.socket) -> dict[str, Any]:
    """Fork once more: the guard tells the client how the other one ends, the other one returns the request."""
    with contextlib.suppress(ConnectionError), connection.makefile("rw", encoding="utf-8") as stream:
        request: dict[str, Any] = json.loads(stream.readline())
        child = os.fork()
        if child == 0:
            return request
        print(child, file=stream, flush=True)
        end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert end is not None
        # The client may be gone by now
        print(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status, file=stream, flush=True)
        stream.readline()  # ends when the client has read it: its number is nobody else's until then
    os.waitpid(child, 0)
    os._exit(0)


def become(request: Mapping[str, Any]) -> None:
    """Run the script of a request as if this interpreter had been started for it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for descriptor, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    script, *arguments = request["command"]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    leave(code)


def leave(code: int) -> NoReturn:
    """End as an interpreter does, but leave its modules: taking them apart is most of the time of a short command."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Forked:
    """Handle a process that a fork server made, as a `subprocess.Popen`."""

    def __init__(
        self, place: Path, command: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path, err: Path
    ) -> None:
        request = {"command": command, "folder": folder, "environment": environment, "stdout": out, "stderr": err}
        self.args = command
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(place))
        self._socket.sendall(json.dumps(request, default=str).encode() + b"\n")
        # No buffer: it might take the exit code along with the number, and then `select` would never see it
        self._stream = self._socket.makefile("rb", buffering=0)
        self.pid = int(self._stream.readline())

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.returncode = int(self._stream.readline())
            self._stream.close()
            self._socket.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code, once there is one."""
        if self.returncode is None and not select.select([self._socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(list(self.args), timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start_server(place: Path, owner: int, environment: Mapping[str, str], modules: Sequence[str] = IMPORTS) -> None:
    """Start a server at a socket and wait until it answers; it lives as long as the process `owner`.

    Where `BASE` is set, it is a fork of that server, and imports what that one lacks.

    Raises:
        AssertionError: it has ended instead; the message is what it said.
    """
    log = place.with_suffix(".log")
    command = [__file__, str(place), str(owner), *modules]
    server: subprocess.Popen[bytes] | Forked
    if base := os.environ.get(BASE):
        server = Forked(Path(base), command, place.parent, environment, Path(os.devnull), log)
    else:
        with log.open("wb") as output:
            command = [sys.executable, *command]
            server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    while not place.exists():
        assert server.poll() is None, log.read_text(errors="replace")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
