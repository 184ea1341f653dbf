"""A command whose output nobody reads any more, as behind `| head`, ends without a word; what reads it gets it all."""

import subprocess
import sys

import pytest

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.system.exit_codes import UNREAD, UNUSABLE
from tests.conftest import PATIENCE, environment

BEGIN = "import os, sys\nfrom plumbline.launcher.runtime.commands import cli\n"


@pytest.mark.parametrize(
    "prints",
    [
        "for number in range(10**6): print(number)",  # more than a pipe holds
        "sys.stdin.read(); print(1)",  # so little that it is written at the end
    ],
)
def test_a_command_that_is_not_read_ends_in_silence(prints: str) -> None:
    script = f"{BEGIN}def main():\n    print(0, flush=True)\n    {prints}\ncli.run(main)"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    process.stdin.close()
    assert (process.stderr.read(), process.wait(PATIENCE)) == ("", UNREAD)


def test_another_pipe_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise BrokenPipeError(32, "the store hung up")

    assert cli.code_of(main) == UNUSABLE
    assert "the store hung up" in capsys.readouterr().err


def test_a_character_that_the_terminal_lacks_is_escaped() -> None:
    script = f"{BEGIN}cli.run(lambda: print('caf\\xe9 \\udcff'))"
    words = [sys.executable, "-c", script]
    done = subprocess.run(
        words, env={**environment(), "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\udcff\n", "")
