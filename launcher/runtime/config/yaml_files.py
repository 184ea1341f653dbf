"""Read YAML written by users: one place that turns whatever is wrong with it into one readable error."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse
from yaml import MarkedYAMLError, YAMLError

from plumbline.launcher.runtime.config.errors import ConfigError

Node = DictConfig | ListConfig
DEEP = re.compile(rb"(?:[\[{]\s*){500}")
"""What no file that a person writes begins with or holds."""

OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
"""Numbers that YAML 1.1 reads in base 8, by a leading zero, or in base 60, by colons."""


@contextmanager
def yaml_problems(source: str) -> Iterator[None]:
    """Turn an error of YAML or of its interpolations into a ConfigError with `source` in front.

    What the file says is not repeated: `extends:` of somebody else's configuration may name any file of the reader's.
    """
    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{source}: cannot be read as YAML: {error.problem}{where}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: cannot be read as YAML: it is nested too deeply") from error
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError) as error:  # numbers of 5000 digits
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}: cannot be read as YAML: {error}") from error


def read_yaml(path: Path) -> Node:
    """Return the content of a YAML file, its `${...}` not yet replaced.

    Raises:
        ConfigError: there is no such file, it does not hold YAML sections or a list, a number in it is written in
            another base than 10, or a `${...}` in it asks for more than another key: a configuration that somebody else
            wrote must not read the environment, where secrets are, into run folders and error messages.
    """
    if not path.exists():
        known = ", ".join(sorted(str(file) for file in path.parent.glob("*.yaml"))) or "no .yaml files"
        there = f"{path.parent} holds {known}" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{path}: no such file; {there}")
    if path.is_fifo():
        raise ConfigError(f"{path}: is a pipe, which can be read once and no more: write it to a file")
    with yaml_problems(str(path)):
        content = path.read_bytes() if path.is_file() else b""
        if DEEP.search(content):
            raise RecursionError  # ahead of the parser, whose stack would end the process
        check_numbers(content, str(path))
        node: Node = OmegaConf.load(path)
        written = OmegaConf.to_container(node, resolve=False)
        asking = [text for text in _strings(written) if "${" in text and _calls(parse(text))]
    for text in asking:
        raise ConfigError(
            f"{path}: {text}: a file can insert other keys only, like ${{run.name}}; give what comes from the "
            "environment on the command line, for example run.root=$SCRATCH/runs"
        )
    return node


def check_numbers(text: str | bytes, source: str) -> None:
    """Refuse numbers in YAML that people write in base 10 and that are read in another: 010 as 8, 1:30 as 90.

    Raises:
        ConfigError: names the number, with `source` in front.
        MarkedYAMLError: the text is not YAML.
    """
    for token in yaml.scan(text):
        if isinstance(token, yaml.ScalarToken) and token.plain and OTHER_BASE.fullmatch(token.value):
            raise ConfigError(
                f"{source}: {token.value}: YAML reads it as {yaml.safe_load(token.value)}; write a number without a "
                "leading zero and without colons, and text in quotes"
            )


def plain_values(node: Node, source: str) -> Any:
    """Return a YAML node as nested dicts and lists with every `${...}` replaced.

    Raises:
        ConfigError: a `${...}` leads nowhere.
    """
    with yaml_problems(source):
        return OmegaConf.to_container(node, resolve=True)


def _calls(tree: Any) -> bool:
    """Return whether something in a parsed string is inserted by a function, whose name may itself be inserted."""
    children = getattr(tree, "children", None) or ()
    return isinstance(tree, OmegaConfGrammarParser.InterpolationResolverContext) or any(map(_calls, children))


def _strings(value: Any) -> Iterator[str]:
    """Yield every string of nested plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _strings(child)


def escape(value: Any) -> Any:
    """Write every `${` in nested plain values so that OmegaConf reads it back as it is."""
    if isinstance(value, dict):
        return {key: escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values of YAML sections written in `text`, such as an option of the command line.

    Raises:
        ConfigError: it is not YAML; the message begins with `source`.
    """
    with yaml_problems(source):
        check_numbers(text, source)
        return plain_values(OmegaConf.create(text), source)
