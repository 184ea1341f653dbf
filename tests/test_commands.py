"""Every command that a page shows names a script, flags, a configuration file and keys that exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from plumbline.launcher.runtime.config.schema import Config

ROOT = Path(__file__).parents[1]
PAGES = [page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)]
COMMAND = re.compile(
    r"(?:^|[`;|] ?)((?:python|deepspeed|torchrun|srun)(?: -{1,2}\S+(?:[ =]\d+)?)* (?:launcher|tests/\w+)/.*)"
)
CONSOLE = re.compile(r"(^|[`;|] ?)plumbline ([a-z]+)(?= )")
"""What is short for python launcher/COMMAND.py."""
PLACEHOLDER = re.compile(r"[A-Z]{2,}|\.\.\.|[<>*$]")
OVERRIDE = re.compile(r"([a-z_]+)\.([a-z_0-9]+)(?:\.[\w.]+)?=")
HELPERS = ("tests/benchmarks/step_cost.py", "launcher/runtime/commands/cli.py", "launcher/runtime/report/command.py")


def joined(page: Path) -> Iterator[str]:
    """Yield the lines of a page, those that end in a backslash with the next."""
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        yield CONSOLE.sub(r"\1python launcher/\2.py", line.strip())


def commands() -> list[tuple[str, list[str]]]:
    """Return page -> words of each command of Python that it shows."""
    shown = []
    for page in PAGES:
        for line in joined(page):
            found = COMMAND.search(line)
            if found is None:
                continue
            text = found[1].split("`")[0] if "`" in line[: found.start(1) + 1] else found[1]
            try:
                words = shlex.split(text, comments=True)
            except ValueError:  # a quotation that goes on in the next line
                words = re.sub(r"\s#.*", "", text).split()
            shown.append((str(page.relative_to(ROOT)), [word.rstrip("`,.;)") for word in words]))
    return shown


SHOWN = commands()


@cache
def flags_of(script: str) -> set[str]:
    """Return the flags of a script: those in its text and in the helpers that add some."""
    sources = [ROOT / script, *(ROOT / helper for helper in HELPERS if (ROOT / helper).exists())]
    return {flag for source in sources for flag in re.findall(r'"(--[a-z-]+)"', source.read_text(encoding="utf-8"))}


def script_of(words: list[str]) -> str:
    return next(word for word in words if word.endswith(".py"))


def is_to_be_written(page: str, file: str) -> bool:
    """Return whether a page tells its reader to write this file."""
    told = rf"\b[Ww]rite\s[^.]*`{re.escape(file)}`"
    return re.search(told, (ROOT / page).read_text(encoding="utf-8")) is not None


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) > 60
    assert {"launcher/pretrain.py", "launcher/sweep.py"} < {script_of(words) for _, words in SHOWN}


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=[f"{page}:{' '.join(words)[:60]}" for page, words in SHOWN])
def test_scripts_flags_files_and_keys_exist(page: str, words: list[str]) -> None:
    script = script_of(words)
    assert (ROOT / script).is_file(), f"{page}: {script}"
    arguments = words[words.index(script) + 1 :]
    if "|" in arguments:
        arguments = arguments[: arguments.index("|")]
    for flag, value in zip(arguments, [*arguments, ""][1:], strict=True):
        name = flag.strip("[]").split("=")[0]
        if name.startswith("--"):
            assert name in flags_of(script) | {"--help"}, f"{page}: {script} has no {name}"
        if flag == "--config" and value.startswith("configs/") and not PLACEHOLDER.search(value):
            assert (ROOT / value).is_file() or is_to_be_written(page, value), f"{page}: {value}"
    for word in (word for word in arguments if "section.key" not in word):
        for section, key in OVERRIDE.findall(word):
            assert section in Config.model_fields, f"{page}: {word}"
            schema = str(Config.model_json_schema())
            assert f"'{key}'" in schema, f"{page}: {word}"


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for line in joined(page):
            named = re.findall(r"(?:^|`)make ([a-z]+)(?:\s{2,}#|`|$)", line)
            assert set(named) <= targets, f"{page}: {line}"
