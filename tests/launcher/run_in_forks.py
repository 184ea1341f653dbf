"""Run sequences of entry points, each sequence in a fork of this process, and print how it ended and what it imported.

The argument is a JSON list of sequences; a sequence is a list of commands, [["plan", "--config", "x.yaml"], ...]. The
result is a JSON list with an object for each sequence: the exit codes, the output and the libraries that were imported.
"""

import io
import json
import os
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"


def run(commands: list[list[str]]) -> dict[str, Any]:
    """Run commands one after the other as `python launcher/VERB.py` would."""
    codes: list[int | str] = []
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        for verb, *arguments in commands:
            script = str(LAUNCHER / f"{verb}.py")
            sys.argv = [script, *arguments]
            try:
                runpy.run_path(script, run_name="__main__")
                codes.append(0)
            except SystemExit as left:
                codes.append(left.code or 0)
            except Exception:
                traceback.print_exc()
                codes.append(1)
    imported = sorted({name.partition(".")[0] for name in sys.modules})
    return {"codes": codes, "output": output.getvalue(), "errors": errors.getvalue(), "imported": imported}


def in_a_fork(commands: list[list[str]]) -> Any:
    """Return what `run` returns, from a process that has imported what this one has and nothing more."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            json.dump(run(commands), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        told = json.load(pipe)
    os.waitpid(child, 0)
    return told


if __name__ == "__main__":
    sys.path[0] = str(LAUNCHER)
    print(json.dumps([in_a_fork(commands) for commands in json.loads(sys.argv[1])]))
