"""Signals raise a flag and nothing else; the flag is agreed on by the ranks in tests/distributed/test_resume.py."""

import os
import signal
from collections.abc import Iterator

import pytest

from plumbline.launcher.runtime.system.signals import REQUEUE, StopRequest

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
