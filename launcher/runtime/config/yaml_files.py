"""Read YAML written by users, and turn every problem with it into one readable error."""

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
from plumbline.launcher.runtime.system.files import naming

Node = DictConfig | ListConfig
DEEPEST = 500
"""Levels of nesting that no file written by a person has."""
BEGINS = (
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
)
ENDS = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)

OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
"""Numbers that YAML 1.1 reads in base 8, with a leading zero, or in base 60, with colons."""


@contextmanager
def yaml_problems(source: str) -> Iterator[None]:
    """Turn an error of YAML or of its interpolations into a ConfigError with `source` in front.

    The file's contents are not quoted: `extends:` in a configuration by somebody else may name any of the user's files.
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
        # An error of the disk may pass, unlike OmegaConf's own, which has no number
        if isinstance(error, ConfigError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise ConfigError(f"{source}: cannot be read as YAML: {error}") from error


def read_yaml(path: Path) -> Node:
    """Return the content of a YAML file, its `${...}` not yet replaced.

    Raises:
        ConfigError: there is no such file, it does not hold YAML sections or a list, it has a number in another base
            than 10, or a `${...}` that refers to more than another key: a configuration by somebody else must not read
            secrets from the environment into run folders and error messages.
        OSError: the disk cannot read it.
    """
    if not path.exists():
        known = ", ".join(sorted(str(file) for file in path.parent.glob("*.yaml"))) or "no .yaml files"
        there = f"{path.parent} holds {known}" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{path}: no such file; {there}")
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.yaml"))) or "no .yaml files"
        raise ConfigError(f"{path}: is a folder; name a file in it, which holds {inside}")
    if path.is_fifo():
        raise ConfigError(f"{path}: is a pipe, which can be read once and no more: write it to a file")
    with yaml_problems(str(path)), naming(path):
        content = path.read_bytes() if path.is_file() else b""
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
    """Refuse numbers in YAML that people mean in base 10 but that are read in another: 010 as 8, 1:30 as 90.

    Raises:
        ConfigError: names the number, with `source` in front.
        MarkedYAMLError: the text is not YAML.
        RecursionError: it is nested more than `DEEPEST` levels deep.
    """
    depth = 0
    for token in yaml.scan(text):
        depth += isinstance(token, BEGINS) - isinstance(token, ENDS)
        if depth > DEEPEST:
            raise RecursionError  # before the parser's stack overflows and ends the process
        if isinstance(token, yaml.ScalarToken) and token.plain and OTHER_BASE.fullmatch(token.value):
            raise ConfigError(
                f"{source}: {token.value}: YAML reads it as {yaml.safe_load(token.value)}; write a number without a "
                "leading zero and without colons, and text in quotes"
            )


def plain_values(node: Node, source: str) -> Any:
    """Return a YAML node as nested dicts and lists with every `${...}` replaced.

    Raises:
        ConfigError: a `${...}` refers to a key that does not exist.
    """
    with yaml_problems(source):
        return OmegaConf.to_container(node, resolve=True)


def _calls(tree: Any) -> bool:
    """Return whether a parsed string calls a function in an interpolation, whose name may itself be interpolated."""
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
    """Escape every `${` in nested plain values so that OmegaConf reads it back unchanged."""
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
