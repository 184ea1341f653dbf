"""Progress on a terminal is one line that moves; in a log it is a line now and then, and nothing else."""

import fcntl
import os
import re
import select
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from plumbline.launcher.runtime.run.progress import StepProgress
from plumbline.launcher.runtime.system.log import LOG, TRAINING


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 4.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 7.0, "mfu": 0.25}


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Put a terminal of 90 columns in the place of standard output and error; yields what reads what it shows."""
    main, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    with monkeypatch.context() as patched, open(other, "w", encoding="utf-8") as stream:  # noqa: PTH123
        patched.setenv("TERM", "xterm")
        patched.delenv("NO_COLOR", raising=False)
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        yield lambda: b"".join(parts(main)).decode()
    os.close(main)


def parts(main: int) -> Iterator[bytes]:
    """Yield what a terminal has to show; the kernel hands it out in parts, and a moment after it was written."""
    while select.select([main], [], [], 1.0)[0]:
        yield os.read(main, 65536)


def shown(text: str) -> list[str]:
    """Return the lines that are left on a terminal."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        *_, last = [part for part in line.split("\r") if part.strip()] or [""]
        lines.append(last.rstrip())
    return [line for line in lines if line]


def test_a_terminal_has_one_line_of_steps_with_all_others_above(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        progress = StepProgress(0, 10, lambda step: step)
        for step in (1, 2, 3):
            progress.update(record(step))
            TRAINING.info(f"step {step}: held-out loss 3")
        LOG.warning("slow")
        progress.update(record(10))
        progress.close()
        TRAINING.info("complete")
        lines = shown(read())
    assert lines[:3] == [f"step {step}: held-out loss 3" for step in (1, 2, 3)]
    assert lines[3] == "\x1b[33mwarning\x1b[0m: slow"
    assert re.match(r"step 10/10 \|█{10}\| eta 0:00  loss 4\.0000  lr 1\.00e-01  grad 1\.00  7 tokens/s", lines[4])
    assert lines[5:] == ["complete"]


def test_a_terminal_that_is_gone_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main, other = os.openpty()
    stream = open(other, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - a descriptor, which cannot be closed later
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        progress = StepProgress(0, 10, lambda step: step)
        os.close(main)
        for step in range(1, 11):
            progress.update(record(step))
            TRAINING.info(f"step {step}: held-out loss 3")
        progress.close()
    with suppress(OSError):
        stream.close()
    assert capsys.readouterr().err == "", "nor is it told"


def test_colours_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        LOG.error("broken")
        monkeypatch.setenv("NO_COLOR", "1")
        LOG.error("broken")
        assert read() == "\x1b[31merror\x1b[0m: broken\r\nerror: broken\r\n"


def test_a_log_has_lines_without_bar_and_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    progress = StepProgress(4, 6, lambda step: step)
    progress.update(record(5))
    LOG.warning("slow")
    progress.update(record(6))
    progress.close()
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "step 5/6  loss 4.0000  lr 1.00e-01  grad 1.00  7 tokens/s  mfu 25.0%  eta -:--",
        "step 6/6  loss 4.0000  lr 1.00e-01  grad 1.00  7 tokens/s  mfu 25.0%  eta 0:00",
    ]
    assert told.err == "warning: slow\n"
