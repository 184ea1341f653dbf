"""Ctrl-C, once and twice, in every command: exit code 130, no traceback, and nothing half written that looks whole."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from plumbline.data.workspace import PARTIAL
from plumbline.launcher.runtime.system.exit_codes import INTERRUPTED, REQUEUE
from tests.conftest import PATIENCE, Job, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pretrain, Start

BEGIN = """
import hashlib, signal, subprocess, sys, time
sys.path.insert(0, "launcher")
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.commands.interrupts import interrupts
cli.begin(lambda: None)
def ready(): print("ready", flush=True)
"""
IN_IMPORTS = "ready(); time.sleep(1000)"
IN_WORK = "def main(): ready(); time.sleep(1000)\ncli.run(main, 'interrupted; tidy')"
IN_A_LIBRARY = """
def main():
    try:
        ready(); time.sleep(1000)
    except KeyboardInterrupt:
        raise KeyError("an error of its own")
cli.run(main, 'interrupted; tidy')
"""
TAKEN_FOR_A_FAULT = """
def main():
    try:
        ready(); time.sleep(1000)
    except KeyboardInterrupt:
        return fault
cli.run(main, 'interrupted; tidy')
"""
IN_TIDYING = """
def main():
    try:
        ready(); time.sleep(1000)
    finally:
        ready()
        try:
            while True: time.sleep(0.01)
        except KeyboardInterrupt:
            print("what tidies up was interrupted", flush=True)
cli.run(main)
"""
IN_C = "def main(): ready(); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)\ncli.run(main, 'interrupted; tidy')"
WITH_A_CHILD = """
def main():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(child.pid, flush=True)
    child.wait()
    time.sleep(1000)
cli.run(main)
"""
ANSWERED = """
def main():
    for _ in range(3):
        try:
            ready(); time.sleep(1000)
        except KeyboardInterrupt:
            interrupts().answered()
    return 7
cli.run(main)
"""
HEARD_TWICE = """
import os
from threading import Thread
from plumbline.launcher.runtime.commands.interrupts import end
write = os.write
os.write = lambda *given: (print("writing", flush=True), time.sleep(0.5), write(*given))
Thread(target=end).start()
time.sleep(0.2)
end()
"""
BEHIND_WORK = "import atexit\natexit.register(lambda: (ready(), time.sleep(1000)))\ncli.run(lambda: 0)"


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Let processes that tests start hear Ctrl-C, also where a shell's background, which ignores it, runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def begin(script: str, ignoring: bool = False) -> subprocess.Popen[str]:
    """Start a script; with `ignoring` as a shell without job control starts what runs in its background."""
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignoring else None,
    )


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C once the script has said a line; returns the line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    time.sleep(0.05)  # so that what follows the line has begun, which is what the test is about
    process.send_signal(signal.SIGINT)
    return line.strip()


def press_until_it_ends(process: subprocess.Popen[str]) -> None:
    """Press Ctrl-C once more, and again: two that a busy machine has not told the process of yet are one."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    process.kill()


@pytest.mark.parametrize(
    ("script", "presses", "code", "told"),
    [
        (IN_IMPORTS, 1, INTERRUPTED, "error: interrupted\n"),
        (IN_WORK, 1, INTERRUPTED, "error: interrupted; tidy\n"),
        (IN_A_LIBRARY, 1, INTERRUPTED, "error: interrupted; tidy\n"),
        ("fault = 2\n" + TAKEN_FOR_A_FAULT, 1, INTERRUPTED, "error: interrupted; tidy\n"),
        ("fault = 0\n" + TAKEN_FOR_A_FAULT, 1, 0, ""),  # all is done: the interrupt came too late
        (IN_TIDYING, 2, INTERRUPTED, "error: interrupted\n"),
        (ANSWERED, 3, 7, ""),
        (BEHIND_WORK, 1, -signal.SIGINT, ""),
    ],
)
def test_a_process_ends_by_the_rules_of_the_moment(script: str, presses: int, code: int, told: str) -> None:
    process = begin(script)
    for _ in range(presses):
        assert interrupt(process) == "ready"
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors, output) == (code, told, "")


def test_the_second_one_ends_what_is_at_work_in_c() -> None:
    process = begin(IN_C)
    interrupt(process)
    press_until_it_ends(process)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (INTERRUPTED, "error: interrupted\n")


def test_the_second_one_ends_what_was_started_as_well() -> None:
    process = begin(WITH_A_CHILD)
    child = psutil.Process(int(interrupt(process)))
    press_until_it_ends(process)
    _, errors = process.communicate()
    assert (process.returncode, "Traceback" in errors) == (INTERRUPTED, False)
    child.wait(PATIENCE)


def test_what_is_heard_by_two_threads_at_once_is_said_once() -> None:
    process = begin(HEARD_TWICE)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors, output) == (INTERRUPTED, "error: interrupted\n", "writing\n")


def test_who_starts_a_command_may_have_interrupts_ignored() -> None:
    process = begin("def main(): ready(); time.sleep(0.3); return 7\ncli.run(main)", ignoring=True)
    interrupt(process)
    assert process.wait(PATIENCE) == 7


@pytest.fixture(scope="module")
def trained(run_pretrain: Pretrain, tiny_config: Path) -> Path:
    outcome = run_pretrain(tiny_config, "interrupted", ["train.steps=4", "train.eval_interval=null"], launcher="python")
    assert outcome.code == 0, outcome.stderr
    return Path(outcome.run.folder)


LAST = {
    "prepare": lambda output: (output / "corpus.json").is_file(),
    "export": lambda output: (output / "README.md").is_file(),
    "report": lambda output: output.read_text(encoding="utf-8").rstrip().endswith("</html>"),
}
"""Command -> whether what it writes last is in an output."""


def is_at_work(job: Job) -> bool:
    """Return whether a command hears interrupts: a thread of its own listens to them."""
    (process,) = job.processes
    return process.poll() is not None or psutil.Process(process.pid).num_threads() > 1


@pytest.mark.parametrize("delay", [0.0, 0.3])
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("verb", ["prepare", "eval", "export", "quantize", "report", "generate"])
def test_no_command_shows_a_traceback_or_leaves_half_a_result(
    start: Start, trained: Path, corpus: Path, tmp_path: Path, verb: str, presses: int, delay: float
) -> None:
    output = tmp_path / "out"
    source = ("--source", "stdlib", "--tokenizer", "train-bpe:2000", "--workers", "2", "--output", output)
    words: dict[str, tuple[str | Path, ...]] = {
        "prepare": source,
        "eval": ("--model", trained, "--data", corpus),
        "export": ("--model", trained, "--output", output),
        "quantize": ("--model", trained, "--data", corpus, "--recipes", "gptq-w4", "--output", output),
        "report": (trained, "--output", output),
        "generate": ("--model", trained, "--prompt", "def", "--max-new-tokens", "20", "--samples", "50"),
    }
    job = start(f"launcher/{verb}.py", words[verb], tmp_path, launcher="python")
    job.wait_until(lambda: is_at_work(job))
    time.sleep(delay)
    for _ in range(presses):
        for process in job.processes:
            process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    outcome = job.wait()
    assert outcome.code in (INTERRUPTED, -signal.SIGINT, 0), outcome.stderr
    assert "Traceback" not in outcome.stderr
    if outcome.code == INTERRUPTED:
        assert "error: interrupted" in outcome.stderr
    if verb in LAST:
        assert not output.exists() or LAST[verb](output), "what came last is there as well, if the name is"
        assert all(path.name.endswith((PARTIAL, ".staging")) for path in tmp_path.glob(".*"))


def test_who_is_asked_for_prompts_may_leave_by_an_interrupt(trained: Path) -> None:
    screen, theirs = pty.openpty()
    command = [sys.executable, "launcher/generate.py", "--model", str(trained), "--interactive"]
    process = subprocess.Popen(
        command, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)

    def shown(until: str) -> str:
        text = ""
        with suppress(OSError):  # the process has ended
            while until not in text:
                text = re.sub("\x1b\\[[0-9]*m", "", text + os.read(screen, 4096).decode())  # a terminal has colours
        return text

    shown("> ")
    os.write(screen, b"def\n")
    shown("> ")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    told = shown("error: interrupted")  # unless the second one ends it first
    assert "Traceback" not in told
    assert process.wait(PATIENCE) in (INTERRUPTED, -signal.SIGINT)
    assert process.returncode == -signal.SIGINT or "error: interrupted" in told


def test_a_sweep_ends_at_the_second_one_and_says_nothing_of_its_workers(
    start: Start, tiny_config: Path, tmp_path: Path
) -> None:
    config = tmp_path / "sweep.yaml"
    config.write_text(
        f"{{name: twice, base: {tiny_config}, root: {tmp_path}, set: {{train.steps: 50000}}, "
        "grids: [{axes: {optimizer.lr: [0.001, 0.002]}}]}",
        encoding="utf-8",
    )
    job = start("launcher/sweep.py", ["--config", config, "--workers", "2"], tmp_path, launcher="python")
    job.wait_until(lambda: len(list(tmp_path.rglob("metrics.jsonl"))) == 2)
    (process,) = job.processes
    workers = psutil.Process(process.pid).children()
    for _ in range(2):
        for each in (*workers, process):  # as a terminal does
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGINT)
        time.sleep(0.1)
    outcome = job.wait()
    assert outcome.code in (INTERRUPTED, REQUEUE), outcome.stderr  # if two came as one, or all was saved by then
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert not psutil.wait_procs(workers, PATIENCE)[1]
    assert not list(tmp_path.rglob("result.json"))
