"""Share code of entry points: options, one clear line for a user's error, and a traceback for a bug."""

import argparse
import io
import json
import os
import platform
import re
import select
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from plumbline.data.disk import AWAY
from plumbline.data.paths import is_url
from plumbline.launcher.runtime.cluster.nodes import own_job
from plumbline.launcher.runtime.commands.completion import complete
from plumbline.launcher.runtime.commands.interrupts import interrupts
from plumbline.launcher.runtime.system import imports
from plumbline.launcher.runtime.system.exit_codes import INTERRUPTED, UNREACHED, UNREAD, UNUSABLE
from plumbline.launcher.runtime.system.faults import is_out_of_memory, out_of_memory
from plumbline.launcher.runtime.system.files import finite
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.system.node_folder import use_node_folder
from plumbline.launcher.runtime.system.open_files import allow_many_files
from plumbline.launcher.runtime.system.threads import sleep_while_waiting

MODEL = "run, checkpoint or Hugging Face folder, or hf:NAME"
"""Help of `--model`, which `config.stock.model_folder` turns into a folder."""
AVERAGE = "weights instead of the last: ema, last:K (checkpoints) or steps:A,B,...; see docs/averages.md"
"""Help of `--average`, which `models.averages` reads."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of a description, and add the default of each option whose help does not state it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told, has_value = action.help or "", action.option_strings and action.nargs != 0
        if not has_value or action.default in (None, "") or "default" in told:
            return told
        return f"{told} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Parse a command line, or complete it; if an override is written as an option, explain how to write it.

    Args:
        description: printed by `--help` as it is.
        options: others of `argparse.ArgumentParser`.
    """

    def __init__(self, description: str | None = None, **options: Any) -> None:
        super().__init__(description=description, formatter_class=HelpFormatter, **options)

    def parse_args(self, *given: Any, **named: Any) -> argparse.Namespace:  # type: ignore[override]
        """Read the command line, unless a shell asks what completes it."""
        complete(self)
        arguments: argparse.Namespace = super().parse_args(*given, **named)
        return arguments

    def parse_intermixed_args(self, *given: Any, **named: Any) -> argparse.Namespace:  # type: ignore[override]
        """Read the command line, unless a shell asks what completes it."""
        complete(self)
        arguments: argparse.Namespace = super().parse_intermixed_args(*given, **named)
        return arguments

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        found = re.search(r"unrecognized arguments: -+([\w-]+\.[\w.-]+)(=\S*)?", message)
        if found is not None:
            message += f"; keys of the configuration have no dashes: {found[1]}{found[2] or '=VALUE'}"
        elif "--config" in self._option_string_actions and re.search(r"unrecognized arguments:.* --?resume\b", message):
            message += "; a run resumes by itself: the same command goes on from its newest checkpoint"
        elif "are required: --config" in message and (files := [each for each in sys.argv[1:] if is_yaml(each)]):
            message += f"; did you mean --config {files[0]}?"
        elif close := self._options_like(message):
            message += f"; did you mean {close[0]}?"
        elif "--partition" in self._option_string_actions and re.search(r"unrecognized arguments:.*--\w", message):
            message += "; sbatch's other options are variables in slurm/cluster.env, --mem as SBATCH_MEM_PER_NODE"
        elif self._takes_overrides() and "unrecognized arguments: -" in message:
            message += "; values of the configuration are written section.key=VALUE, without dashes"
        elif option := self._option_before(message):
            message += f"; {option} takes one value (in quotes, if it has blanks)"
        super().error(message)

    def _options_like(self, message: str) -> list[str]:
        """Return the option most like the first that the message says is unknown."""
        found = re.search(r"unrecognized arguments: (-[\w-]+)", message)
        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        return [] if found is None else get_close_matches(found[1], known, n=1, cutoff=0.8)

    def _option_before(self, message: str) -> str | None:
        """Return the option for which the first word that the message says is unknown would be a second value."""
        found = re.search(r"unrecognized arguments: ([^-\s]\S*)", message)
        words = sys.argv[1:]
        if found is None or found[1] not in words[2:]:
            return None
        option = self._option_string_actions.get(words[words.index(found[1], 2) - 2])
        return option.option_strings[0] if option is not None and option.nargs is None else None

    def _takes_overrides(self) -> bool:
        return any(action.dest == "overrides" for action in self._actions)


def is_yaml(word: str) -> bool:
    """Return whether a word of a command line names a YAML file."""
    return word.endswith((".yaml", ".yml")) and "=" not in word


def begin(parse_arguments: Callable[[], object]) -> None:
    """Parse the command line before imports that take seconds, so that --help, mistakes and Ctrl-C work at once."""
    interrupts()
    parse_arguments()
    sleep_while_waiting()
    use_node_folder()
    allow_many_files()
    imports.begin()


def run(command: Callable[[], int | None], interrupted: str = "interrupted") -> NoReturn:
    """Run an entry point and exit with its code."""
    imports.end()
    sys.exit(code_of(command, interrupted))


def code_of(command: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run an entry point; return its code. ValueError and OSError mean that the request cannot be met.

    Args:
        command: the entry point.
        interrupted: message after the first Ctrl-C; the second ends the command at once.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that its encoding lacks would end the command halfway
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interrupts().tidily():
            code = command() or 0
            print(end="", flush=True)
            if code and interrupts().is_raised:  # what the command took for a fault was the interrupt, as below
                raise KeyboardInterrupt
            return code
    except (KeyboardInterrupt, Exception) as error:
        # OmegaConf may raise an error of its own in place of the interrupt
        if isinstance(error, KeyboardInterrupt) or interrupts().is_raised:
            LOG.error(interrupted)
            return INTERRUPTED
        return _code_of_error(error)


def _code_of_error(error: Exception) -> int:
    """Log an error of a command, and return its exit code; raise it again if it is a bug."""
    if isinstance(error, BrokenPipeError) and _is_unread():
        return UNREAD
    if isinstance(error, ValueError | OSError):
        LOG.error(error)
        return code_of_refusal(error)
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        LOG.error(out_of_memory(error, platform.node(), "less at once, such as a smaller batch, takes less"))
        return UNUSABLE
    raise error


def code_of_refusal(error: Exception) -> int:
    """Return the exit code of an error that is no bug: 2, or in a job whose disk is away 89, for it may come back."""
    is_away = isinstance(error, OSError) and error.errno in AWAY
    return UNREACHED if is_away and own_job() is not None else UNUSABLE


def run_on_ranks(command: Callable[[], int | None]) -> NoReturn:
    """Run a distributed entry point, and end the process at once with its code.

    Threads of gloo outlive the process group, and can abort the interpreter while it shuts down.
    """
    imports.end()
    code = code_of(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_unread() -> bool:
    """Return whether the reader of standard output has gone, as `head` does; the remaining output is then discarded."""
    output = select.poll()
    output.register(1, 0)
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains at exit
    return gone


def print_json(value: Any) -> None:
    """Print one JSON document on standard output, with null for numbers that are not finite."""
    print(json.dumps(finite(value), indent=2))


def escaped(text: str) -> str:
    """Escape all characters that are not printable, including line breaks, so that a terminal shows and obeys none."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def positive(text: str) -> int:
    """Return an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def gpus(text: str) -> str:
    """Return a number of GPUs in Slurm's form, N or TYPE:N, for argparse."""
    if re.fullmatch(r"([^\s:]+:)?[1-9]\d*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs: give N, or TYPE:N such as h100:4")
    return text


def natural(text: str) -> int:
    """Return an integer of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def seed(text: str) -> int:
    """Return a seed that torch accepts, with room for seeds counted up from it, for argparse."""
    value = natural(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{value} is not below 2^63")
    return value


def as_argument(parse: Callable[[str], int]) -> Callable[[str], int]:
    """Make argparse show the message of a parser's ValueError instead of its own."""

    def argument(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return argument


def existing(text: str) -> Path:
    """Return the path of an existing file or folder, for argparse."""
    path = Path(text)
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text}: files and folders of this machine are taken here; copy it here")
    if not path.exists():
        beside = [other.name for other in path.parent.glob(f"*{path.suffix}") if not other.name.startswith(".")]
        closest = get_close_matches(path.name, beside, n=10, cutoff=0)
        raise argparse.ArgumentTypeError(
            f"{text}: no such file or folder; {path.parent} holds {', '.join(closest) or 'nothing like it'}"
        )
    return path


def model(text: str) -> str:
    """Return the path of an existing model, or hf:NAME for one on the hub, for argparse."""
    return text if text.startswith("hf:") else str(existing(text))


def own_model(text: str) -> Path:
    """Return the path of an existing run or checkpoint, for argparse."""
    if text.startswith("hf:"):
        raise argparse.ArgumentTypeError(f"{text} is a Hugging Face folder already; give a run or a checkpoint")
    return existing(text)


def existing_or_stdin(text: str) -> str:
    """Return the path of an existing file or folder, or "-" for standard input, for argparse."""
    return text if text == "-" else str(existing(text))


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add `--local_rank`, which the DeepSpeed launcher passes to each rank; the environment has it too."""
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, a name for `models.open.device_named`."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the first GPU if there is one)")


def add_arithmetic_options(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype`, a key of `models.open.DTYPES`, and `--device`."""
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="arithmetic")
    add_device_option(parser)


def add_job_options(parser: argparse._ActionsContainer, what: str) -> None:
    """Add the options of every Slurm job, which `job_options` reads; `what` is the thing with the time limit."""
    default = "default: SBATCH_TIMELIMIT of slurm/cluster.env, else 24:00:00"
    parser.add_argument(
        "--time", help=f"time limit of {what}, e.g. 8:00:00; one that needs longer requeues itself ({default})"
    )
    parser.add_argument(
        "--notice", type=positive, metavar="SECONDS", help="time to save in before the time limit (default: 300)"
    )
    for option, text in SITE_OPTIONS.items():
        parser.add_argument(option, help=text)


SITE_OPTIONS = {
    "--partition": "A[,B,...] (default: slurm/cluster.env, else the cluster's)",
    "--account": "default: slurm/cluster.env, else the cluster's",
    "--qos": "default: slurm/cluster.env, else the cluster's",
    "--constraint": "features that every node must have (default: slurm/cluster.env, else none)",
    "--reservation": "a reservation to run in",
    "--exclude": "nodes to stay away from, e.g. n[1-2],n7",
    "--mail-user": "address for a mail when the job ends or fails",
}
"""Options that sbatch has under the same names."""
JOB_OPTIONS = ("--time", "--notice", *SITE_OPTIONS)


def job_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of `add_job_options`, by the field names of `slurm.Request`."""
    site = {option[2:]: value_of(arguments, option) for option in SITE_OPTIONS}
    fields = {"time": arguments.time, "notice": arguments.notice}
    return {
        **{name: value for name, value in fields.items() if value is not None},
        "site": {option: value for option, value in site.items() if value is not None},
    }


def given(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the spellings, such as --world-size, of those options of these names that were given."""
    values = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names}
    return [option for option, value in values.items() if value is not None and value is not False]  # 0 was given


def value_of(arguments: argparse.Namespace, option: str) -> Any:
    """Return the value of an option, given its spelling such as --mail-user."""
    return getattr(arguments, option[2:].replace("-", "_"))
