"""No command looks for garbage while it imports, and each does when it works."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, REPOSITORY, Start, environment

STAND_IN = "import gc, os\nprint(gc.isenabled(), flush=True)\nos._exit(7)\n"
AT_THE_END = """
import atexit, gc, os, runpy, sys

def leave(code):
    print(gc.isenabled(), file=sys.stderr, flush=True)
    really_leave(code)

really_leave, os._exit = os._exit, leave
atexit.register(os._exit, 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IN_WORK = """
import gc
from plumbline.launcher.runtime.commands import cli

def main():
    print(gc.isenabled(), gc.get_freeze_count() > 10_000)

cli.begin(lambda: None)
cli.{run}(main)
"""


@pytest.mark.parametrize("verb", ["pretrain", "generate"])
def test_imports_are_left_alone(tmp_path: Path, tiny_config: Path, verb: str) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
    options = ["--config", str(tiny_config)] if verb == "pretrain" else ["--model", str(tmp_path)]
    words = [sys.executable, str(REPOSITORY / "launcher" / f"{verb}.py"), *options]
    whole = environment({"PYTHONPATH": str(tmp_path)})
    done = subprocess.run(words, env=whole, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (7, ["False"]), done.stderr


@pytest.mark.parametrize("run", ["run", "run_on_ranks"])
def test_what_was_imported_is_never_looked_at_again(run: str) -> None:
    script = IN_WORK.format(run=run)
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


@pytest.mark.parametrize("verb", ["pretrain", "plan"])
def test_garbage_is_collected_in_work(start: Start, tmp_path: Path, tiny_config: Path, verb: str) -> None:
    (tmp_path / "program.py").write_text(AT_THE_END)
    options = ["--dry-run"] if verb == "pretrain" else ["--json"]
    words = [REPOSITORY / "launcher" / f"{verb}.py", "--config", tiny_config, *options]
    ended = start(tmp_path / "program.py", words, tmp_path, launcher="python").wait()
    assert ended.code == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == "True"
