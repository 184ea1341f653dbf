"""Signals raise a flag and nothing else; the flag is agreed on by the ranks in tests/distributed/test_resume.py."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from plumbline.launcher.runtime.system.exit_codes import REQUEUE
from plumbline.launcher.runtime.system.signals import LOOK_SECONDS, StopRequest
from tests.conftest import REPOSITORY, environment

NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put back the handlers that a StopRequest replaces."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with handlers_kept():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
        yield StopRequest()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_no_signal_no_request(stop: StopRequest) -> None:
    assert not stop
    assert stop.signal is None


@pytest.mark.parametrize("number", NUMBERS)
def test_each_signal_is_a_request(stop: StopRequest, number: int) -> None:
    send(number)
    assert stop
    assert stop.signal == number


def test_what_nohup_started_outlives_its_terminal() -> None:
    with handlers_kept():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = StopRequest()
        send(signal.SIGHUP)
        assert not stop
        send(signal.SIGTERM)
        assert stop


def test_requests_may_repeat(stop: StopRequest) -> None:
    """Slurm sends SIGUSR1 ahead of time and SIGTERM at the limit; both mean the same stop."""
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        send(number)
    assert stop


def test_launchers_are_looked_for_once_a_second_however_short_steps_are(
    stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, found = [1000.0], [True, False]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stop, "_has_lost_a_launcher", found.pop)
    assert [bool(stop) for _ in range(9)] == [False] * 9
    assert len(found) == 1
    now[0] += LOOK_SECONDS
    assert [bool(stop) for _ in range(9)] == [True] * 9


def test_a_process_asks_itself(stop: StopRequest) -> None:
    stop.ask("ahead of the time limit")
    assert stop
    assert (stop.signal, stop.reason) == (None, "ahead of the time limit")


def test_a_signal_is_the_reason_although_it_has_ended_the_launcher_too(
    stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does under `deepspeed`."""
    monkeypatch.setattr(stop, "_has_lost_a_launcher", lambda: True)
    assert stop.reason == "because its launcher is gone"
    send(signal.SIGINT)
    assert stop.reason == "on request"


def test_a_second_interrupt_means_now(stop: StopRequest) -> None:
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_the_exit_code_is_the_one_that_the_job_script_requeues_on() -> None:
    assert REQUEUE == 85


RANK = """
import time
from plumbline.launcher.runtime.system.signals import StopRequest
stop = StopRequest()
print(bool(stop), flush=True)
while not stop:
    time.sleep(0.01)
print(stop.signal, stop.is_orphaned, flush=True)
"""
STARTING = """
import ctypes, sys, time
from plumbline.launcher.runtime.system.signals import LOOK_SECONDS, StopRequest
stop, lock = StopRequest(), ctypes.create_string_buffer(64)
stop.end_at_once()
if sys.argv[1] == "deferred":
    stop.defer()
print("here", flush=True)
if sys.argv[1] == "deferred":
    while not stop:
        time.sleep(0.01)
    time.sleep(2 * LOOK_SECONDS)
else:
    for _ in range(2):  # the second time it waits for ever, in C: no handler of Python's is run meanwhile
        ctypes.CDLL(None).pthread_mutex_lock(lock)
print(stop.signal, flush=True)
"""
STARTER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_launcher_is_a_request(tmp_path: Path, killed: int) -> None:
    """Of either process of `deepspeed`; the rank, whose parent lives on when the outer one dies, must look further."""
    with launched(tmp_path, RANK) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "False\n"
        launchers = [psutil.Process(outer.pid), *psutil.Process(outer.pid).children()]
        launchers[killed].send_signal(signal.SIGKILL)
        assert outer.stdout.readline() == "None True\n"


def test_a_process_that_starts_ends_with_its_launcher(tmp_path: Path) -> None:
    with launched(tmp_path, STARTING, "starts") as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "here\n"
        rank = psutil.Process(outer.pid).children(recursive=True)[-1]
        outer.kill()
        try:
            rank.wait(60)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


@contextlib.contextmanager
def launched(folder: Path, program: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Start a program as `deepspeed` does, by way of two launchers and a wrapper."""
    words = [sys.executable]
    for name in ("deepspeed", "deepspeed.launcher.launch", "wrapper", "rank"):
        (folder / name).write_text(program if name == "rank" else STARTER)
        words.append(str(folder / name))
    words += arguments
    with subprocess.Popen(words, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True) as outer:
        yield outer


def test_the_death_of_a_shell_is_none(tmp_path: Path) -> None:
    """`nohup python launcher/pretrain.py &` outlives the shell that it was typed into."""
    (tmp_path / "rank").write_text(RANK)
    (tmp_path / "shell").write_text(STARTER)
    words = [sys.executable, str(tmp_path / "shell"), str(tmp_path / "rank")]
    with subprocess.Popen(words, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "False\n"
        (rank,) = psutil.Process(shell.pid).children()
        shell.kill()
        shell.wait()
        rank.send_signal(signal.SIGUSR1)
        assert shell.stdout.readline() == f"{int(signal.SIGUSR1)} False\n"


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "torchrun"],
        ["-u", "-X", "faulthandler", "-Wignore", "-m", "torchrun"],
        ["-uW", "ignore", "-sm", "torchrun"],
        ["accelerate", "launch"],
    ],
    ids=" ".join,
)
def test_the_first_process_of_a_container_may_be_a_launcher(tmp_path: Path, words: list[str]) -> None:
    """Its number is that of whoever adopts orphans elsewhere."""
    for name in ("torchrun.py", "accelerate"):
        (tmp_path / name).write_text("import subprocess, sys; subprocess.run([sys.executable, 'rank'])")
    (tmp_path / "rank").write_text(
        "import os\nfrom plumbline.launcher.runtime.system.signals import StopRequest\n"
        "os.getppid = lambda: 1\nprint(bool(StopRequest()))"
    )
    path = os.pathsep.join(map(str, (REPOSITORY / "launcher", tmp_path)))
    variables = environment({"TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": path})
    done = subprocess.run(
        [sys.executable, *words, "rank"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("variable", ["CROSS_SIZE", "TORCHELASTIC_RUN_ID"])
def test_a_launcher_that_died_at_once_is_missed(
    monkeypatch: pytest.MonkeyPatch, stop: StopRequest, variable: str
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not stop
    monkeypatch.setenv(variable, "1")
    with handlers_kept():
        assert StopRequest()


@pytest.mark.parametrize("numbers", [NUMBERS[:1], NUMBERS[1:2], (signal.SIGUSR1, signal.SIGTERM)])
def test_a_process_that_starts_ends_at_once_even_in_c(tmp_path: Path, numbers: tuple[signal.Signals, ...]) -> None:
    with starting(tmp_path, "starts") as process:
        for number in numbers:
            process.send_signal(number)
        assert process.wait(60) == REQUEUE


def test_a_process_that_has_something_to_save_does_not(tmp_path: Path) -> None:
    with starting(tmp_path, "deferred") as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.read() == f"{int(signal.SIGUSR1)}\n"
    assert process.returncode == 0


def test_an_error_after_a_request_is_part_of_the_stop(monkeypatch: pytest.MonkeyPatch, stop: StopRequest) -> None:
    """The others have left; unless there is something to save, or nobody asked."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    stop.end_if_asked()
    send(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        stop.end_if_asked()
    assert ended.value.code == REQUEUE
    stop.defer()
    stop.end_if_asked()


@contextlib.contextmanager
def starting(folder: Path, how: str) -> "Iterator[subprocess.Popen[str]]":
    """Start a process that ends at once at a signal, or has deferred that, and then waits in C."""
    (folder / "rank").write_text(STARTING)
    words = [sys.executable, str(folder / "rank"), how]
    with subprocess.Popen(words, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        try:
            yield process
            process.wait(60)
        finally:
            process.kill()
