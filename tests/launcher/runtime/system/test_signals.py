"""Signals raise a flag and nothing else; the flag is agreed on by the ranks in tests/distributed/test_resume.py."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from plumbline.launcher.runtime.system.exit_codes import REQUEUE
from plumbline.launcher.runtime.system.signals import StopRequest
from tests.conftest import REPOSITORY, environment

NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_requests_may_repeat(stop: StopRequest) -> None:
    """Slurm sends SIGUSR1 ahead of time and SIGTERM at the limit; both mean the same stop."""
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        send(number)
    assert stop


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
STARTER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_launcher_is_a_request(tmp_path: Path, killed: int) -> None:
    """Of either process of `deepspeed`; the rank, whose parent lives on when the outer one dies, must look further."""
    words = [sys.executable]
    for name in ("deepspeed", "deepspeed.launcher.launch", "wrapper", "rank"):
        (tmp_path / name).write_text(RANK if name == "rank" else STARTER)
        words.append(str(tmp_path / name))
    with subprocess.Popen(words, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "False\n"
        launchers = [psutil.Process(outer.pid), *psutil.Process(outer.pid).children()]
        launchers[killed].send_signal(signal.SIGKILL)
        assert outer.stdout.readline() == "None True\n"


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


@pytest.mark.parametrize("variable", ["CROSS_SIZE", "TORCHELASTIC_RUN_ID"])
def test_a_launcher_that_died_at_once_is_missed(
    monkeypatch: pytest.MonkeyPatch, stop: StopRequest, variable: str
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not stop
    monkeypatch.setenv(variable, "1")
    assert stop
