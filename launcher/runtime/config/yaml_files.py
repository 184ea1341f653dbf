"""Read YAML written by users: one place that turns whatever is wrong with it into one readable error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from plumbline.launcher.runtime.config.errors import ConfigError

Node = DictConfig | ListConfig


@contextmanager
def yaml_problems(source: str) -> Iterator[None]:
    """Turn an error of YAML or of its interpolations into a ConfigError with `source` in front."""
    try:
        yield
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read as YAML: {error}") from error


def read_yaml(path: Path) -> Node:
    """Return the content of a YAML file, its `${...}` not yet replaced.

    Raises:
        ConfigError: there is no such file, or it does not hold YAML sections or a list.
    """
    if not path.exists():
        known = ", ".join(sorted(str(file) for file in path.parent.glob("*.yaml"))) or "no .yaml files"
        raise ConfigError(f"{path}: no such file; {path.parent} holds {known}")
    with yaml_problems(str(path)):
        node: Node = OmegaConf.load(path)
    return node


def plain_values(node: Node, source: str) -> Any:
    """Return a YAML node as nested dicts and lists with every `${...}` replaced.

    Raises:
        ConfigError: a `${...}` leads nowhere.
    """
    with yaml_problems(source):
        return OmegaConf.to_container(node, resolve=True)


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values of YAML sections written in `text`, such as an option of the command line.

    Raises:
        ConfigError: it is not YAML; the message begins with `source`.
    """
    with yaml_problems(source):
        return plain_values(OmegaConf.create(text), source)
