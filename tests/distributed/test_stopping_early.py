"""A signal before the first step ends a rank at once, whatever it is at: there is nothing to save."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from plumbline.launcher.runtime.run.status_file import read_attempts
from plumbline.launcher.runtime.system.exit_codes import REQUEUE

if TYPE_CHECKING:
    from tests.conftest import Job, NewPort, Start

LONG = ["train.steps=50000", "train.eval_interval=null", "deepspeed.timeout_minutes=60"]
ASKED_THEN_ALONE = """
import os, signal
from plumbline.launcher import pretrain
def is_left_alone(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("Connection closed by peer")
pretrain.{} = is_left_alone
os._exit(pretrain.main())
"""
SOON = 60.0
"""Seconds: less than any wait for others, more than a busy machine needs to end a process."""


def hears(process_id: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process_id}/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_nothing_was_made(job: Job) -> None:
    assert job.run.records == []
    assert job.run.checkpoints == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_while_python_imports(start_pretrain: Start, tiny_config: Path, number: signal.Signals) -> None:
    job = start_pretrain(tiny_config, f"imports_{number.name}", LONG, launcher="python", fresh=True)
    job.wait_until(lambda: hears(job.processes[0].pid, number))
    job.processes[0].send_signal(number)
    outcome = job.wait(SOON)
    assert outcome.code == REQUEUE, outcome.stderr
    assert "stopped on request before the first step" in outcome.stderr
    assert outcome.stdout in ("", "starting: 1 rank of 1 thread\n"), (
        "it did not go on until it had read its configuration"
    )
    assert_nothing_was_made(job)


def test_a_sweep_while_python_imports(start: Start, tiny_config: Path, tmp_path: Path) -> None:
    job = start("launcher/sweep.py", ["--config", tiny_config], tmp_path, launcher="python", fresh=True)
    job.wait_until(lambda: hears(job.processes[0].pid, signal.SIGUSR1))
    job.processes[0].send_signal(signal.SIGUSR1)
    assert job.wait(SOON).code == REQUEUE, "it did not go on until it found that its file is no sweep"


def test_while_it_waits_for_the_other_ranks(start_pretrain: Start, new_port: NewPort, tiny_config: Path) -> None:
    """One rank of two: the rendezvous is in C++, where no handler of Python's runs. The second signal does no harm."""
    port = new_port()
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    job = start_pretrain(tiny_config, "without_the_others", LONG, launcher="python", env=variables)
    job.run.folder.mkdir(parents=True)  # as of an attempt before
    job.wait_until(lambda: is_served(port))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        job.processes[0].send_signal(number)
    outcome = job.wait(SOON)
    assert outcome.code == REQUEUE, outcome.stderr
    assert_nothing_was_made(job)
    (attempt,) = read_attempts(job.run.folder)
    assert (attempt.exit_code, attempt.why) == (REQUEUE, "stopped on request before the first step")


def test_one_of_two_that_build_the_engine(start_pretrain: Start, tiny_config: Path) -> None:
    """A rank that waits in a collective hears the signal; the other does when its launcher ends it, too."""
    job = start_pretrain(tiny_config, "engine", LONG, ranks=2)
    folder = job.run.folder
    job.wait_until((folder / "config.yaml").exists)  # rank 0 has just begun to make the run folder, and 1 waits for it
    job.processes[1].send_signal(signal.SIGSTOP)
    job.wait_until(lambda: is_waiting(job.processes[0].pid))
    job.processes[0].send_signal(signal.SIGUSR1)
    try:
        code = job.processes[0].wait(SOON)
        assert code == REQUEUE, job.texts()
    finally:
        job.processes[1].send_signal(signal.SIGTERM)  # ahead of the error about the rank that has left it
        job.processes[1].send_signal(signal.SIGCONT)
    assert job.wait(SOON).codes == (REQUEUE, REQUEUE)
    assert_nothing_was_made(job)


@pytest.mark.parametrize("where", ["check_together", "train"])
def test_when_the_others_have_left(start: Start, tiny_config: Path, tmp_path: Path, where: str) -> None:
    """They were asked, too: a rank that notices first that they are gone, then that it was asked, did not crash."""
    program = tmp_path / "program.py"
    program.write_text(ASKED_THEN_ALONE.format(where))
    arguments = ["--config", tiny_config, "run.name=alone"]
    outcome = start(program, arguments, tmp_path / "runs" / "alone", launcher="python").wait(SOON)
    assert outcome.code == REQUEUE, outcome.stderr
    assert "Traceback" not in outcome.stderr


def is_waiting(process_id: int) -> bool:
    """Return whether a process takes next to no processor time: it waits for somebody."""
    before = sum(psutil.Process(process_id).cpu_times()[:2])
    time.sleep(0.5)
    return sum(psutil.Process(process_id).cpu_times()[:2]) - before <= 0.02
