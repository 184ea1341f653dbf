"""Command lines are completed by a real bash, at a terminal, after the lines of docs/first-minutes.md."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbline.launcher.runtime.commands.completion import _keys
from tests.conftest import PATIENCE, REPOSITORY, environment

pytest.importorskip("argcomplete")

LINES = ('eval "$(register-python-argcomplete plumbline)"', 'eval "$(activate-global-python-argcomplete --dest=-)"')


class Terminal:
    """Hold a bash that is typed at."""

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self._screen, theirs = pty.openpty()
        path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {**environment(), "PATH": path, "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null"}
        command = ["bash", "--norc", "--noprofile", "-i"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    def type(self, text: str, until: str) -> str:
        """Type, and return what the terminal shows until a text is there."""
        os.write(self._screen, text.encode())
        shown, deadline = "", time.monotonic() + PATIENCE
        while until not in shown.replace("\a", ""):
            assert time.monotonic() < deadline, f"{text!r} shows {shown!r}, without {until!r}"
            if select.select([self._screen], [], [], 0.1)[0]:
                shown += os.read(self._screen, 4096).decode()
        return shown

    def clear(self) -> None:
        """Empty the line that is typed."""
        self.type("\x15echo cl''ear\n", "clear\r\n")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("completion")
    command = folder / "bin" / "plumbline"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m plumbline.launcher "$@"\n')
    command.chmod(0o755)
    terminal = Terminal(REPOSITORY, command.parent)
    for number, line in enumerate(LINES):
        terminal.type(f"{line}; echo don''e {number}\n", f"done {number}\r\n")
    yield terminal
    terminal.process.kill()
    terminal.process.wait()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("plumbline prep", "plumbline prepare "),
        ("plumbline generate --top-", "plumbline generate --top-k"),
        ("plumbline generate --interact", "plumbline generate --interactive "),
        ("plumbline plan --config configs/quicks", "plumbline plan --config configs/quickstart.yaml "),
        ("plumbline eval --dtype b", "plumbline eval --dtype bf16 "),
        ("plumbline pretrain --config x.yaml optimizer.weight_d", "optimizer.weight_decay="),
        ("python launcher/pretrain.py --print", "python launcher/pretrain.py --print-config "),
    ],
)
def test_bash_completes_the_line(terminal: Terminal, typed: str, completed: str) -> None:
    if completed.endswith("-k"):  # --top-k and --top-p: both are shown
        assert "--top-p" in terminal.type(f"{typed}\t\t", "--top-k")
    else:
        terminal.type(f"{typed}\t", completed)
    terminal.clear()


def test_every_key_of_the_configuration_is_offered() -> None:
    keys = _keys()
    assert {"optimizer.lr=", "model.hidden_size=", "objective.name=", "schedule.branch.checkpoint=", "run.name="} <= {
        *keys
    }
    assert len(keys) == len(set(keys)) > 150


def test_nothing_is_imported_for_it_unless_a_shell_asks() -> None:
    script = 'import sys; sys.path.insert(0, "launcher"); sys.argv[1:] = ["--help"]; import runpy\n'
    script += 'try: runpy.run_path("launcher/plan.py", run_name="__main__")\n'
    script += 'except SystemExit: print("argcomplete" in sys.modules)'
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.endswith("False\n")
