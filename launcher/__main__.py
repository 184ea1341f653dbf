# PYTHON_ARGCOMPLETE_OK
"""Run a command by its name, in any folder: plumbline pretrain ... does the same as python launcher/pretrain.py ...

plumbline --help                                     every command, with a one-line description
plumbline pretrain --config configs/quickstart.yaml
python -m plumbline.launcher plan --help             the same in an environment that is not activated
deepspeed --quiet --module plumbline.launcher pretrain --config FILE      on every GPU of this node
"""

import ast
import runpy
import sys
from itertools import takewhile
from pathlib import Path

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.commands.completion import command_on_line

FOLDER = Path(__file__).parent
NO_COMMANDS = ("__init__", "__main__", "plumbline")


def main() -> None:
    """Read the name of a command, and run that command in this process."""
    commands = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in NO_COMMANDS)
    width = max(map(len, commands))
    told = "\n".join(f"  {command:<{width}}  {_first_line(command)}" for command in commands)
    parser = cli.Parser(
        prog="plumbline",
        usage="plumbline [-h] COMMAND ...",
        description="Pretrain language models, and do what comes before and after.",
        epilog=f"commands:\n{told}\n\n`plumbline COMMAND --help` shows what a command takes, with examples.",
    )
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="one of the commands below")
    # deepspeed inserts its own option before all others
    of_launcher = list(takewhile(lambda word: word.startswith("--local_rank="), sys.argv[1:]))
    words = sys.argv[1 + len(of_launcher) :]
    command = command_on_line(commands) or parser.parse_args(words[:1]).command
    sys.argv = [f"plumbline {command}", *of_launcher, *words[1:]]
    runpy.run_module(f"plumbline.launcher.{command}", run_name="__main__")


def _first_line(command: str) -> str:
    """Return the first line of a command's docstring, without importing the command."""
    tree = ast.parse((FOLDER / f"{command}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
