"""`plumbline COMMAND ...` is the command: its usage, its output, its exit code, wherever one is."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, REPOSITORY, environment
from tests.launcher.test_light import VERBS


def plumbline(*words: str | Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "plumbline.launcher", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_help_has_a_line_for_each_command(tmp_path: Path) -> None:
    done = plumbline("--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split(maxsplit=1) for line in done.stdout.partition("commands:\n")[2].split("\n\n")[0].splitlines()]
    assert [name for name, _ in listed] == VERBS
    assert dict(listed)["generate"] == "Continue prompts with a trained model."


def test_a_command_names_itself(tmp_path: Path) -> None:
    done = plumbline("plan", "--help", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: plumbline plan [-h] --config CONFIG")
    assert "(default: 0.4)" in done.stdout, "of --mfu, whose own help does not say so"
    assert "(default: False)" not in done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "plumbline: error: the following arguments are required: COMMAND"),
        (["pretrian"], "plumbline: error: argument COMMAND: invalid choice: 'pretrian' (choose from"),
        (["pretrain"], "plumbline pretrain: error: the following arguments are required: --config"),
        (["pretrain", "--config", "no.yaml"], "error: no.yaml: no such file; . holds no .yaml files"),
        (["--local_rank=0", "pretrain"], "plumbline pretrain: error: the following arguments are required: --config"),
    ],
    ids=["nothing", "another word", "no options", "no file", "as deepspeed --module has it"],
)
def test_mistakes_end_with_2(tmp_path: Path, words: list[str], error: str) -> None:
    done = plumbline(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert error in done.stderr.splitlines()[-1]


def test_processes_that_a_command_starts_are_no_second_command(tmp_path: Path) -> None:
    """A process that is spawned imports the main module of its parent."""
    source = REPOSITORY / "launcher" / "runtime" / "system" / "*.py"
    options = ("--source", source, "--tokenizer", "byte", "--workers", "2", "--output", "corpus")
    done = plumbline("prepare", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("prepared: corpus\n")
    assert (tmp_path / "corpus" / "corpus.json").is_file()
