"""Complete command lines in a shell with argcomplete, if it is installed (docs/first-minutes.md).

The shell runs the command with variables that hold the line; the command prints possible completions, and ends.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plumbline.launcher.runtime.system.installation import ROOT

SCHEMA = ROOT / "configs" / "schema.json"
"""Keys of the configuration."""
WANTED, LINE = "_ARGCOMPLETE", "COMP_LINE"
"""Variables of argcomplete: index from 1 of this program's first word on the line, and the line."""


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions of the line and end the process, if a shell requests it."""
    if WANTED not in os.environ:
        return
    import argcomplete

    for action in parser._actions:
        if action.dest == "overrides":
            action.completer = _keys  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def command_on_line(commands: Sequence[str]) -> str | None:
    """Return COMMAND if a shell completes a line `plumbline COMMAND ...`, or None if it completes the name."""
    words = f"{os.environ.get(LINE, '')}.".split()  # with the dot, an empty last word counts as well
    if WANTED not in os.environ or len(words) < 3 or words[1] not in commands:
        return None
    os.environ[WANTED] = str(int(os.environ[WANTED]) + 1)
    return words[1]


def _keys(**_: Any) -> list[str]:
    """Return the possible beginnings of overrides."""
    if not SCHEMA.is_file():
        return []
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return [f"{key}=" for key in _below(schema, schema["$defs"], "")]


def _below(node: Mapping[str, Any], known: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the keys of a section and of the sections in it."""
    node = known[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    kinds = [_below(kind, known, path) for kind in node.get("anyOf", ())]
    inner = [_below(child, known, f"{path}.{key}".lstrip(".")) for key, child in node.get("properties", {}).items()]
    if not (kinds or inner) and path:
        yield path
    yield from dict.fromkeys(key for each in (*kinds, *inner) for key in each)
