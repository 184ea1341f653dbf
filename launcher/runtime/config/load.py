"""Read a configuration: what is written, completed by what it leaves open; and save it."""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from plumbline.launcher.runtime.config.resolve import resolve
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.written import read_values
from plumbline.launcher.runtime.system.files import write_whole


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read a YAML file, apply its `extends:` chain and the overrides, and fill in what corpora and models decide.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, applied in order; values are parsed as YAML.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown keys, wrong types or values; one line for each problem.
    """
    return resolve(read_values(path, overrides), source=str(path))


def as_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump())))


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration, whole or not at all, as YAML that `load_config` reads back to an equal one."""
    write_whole(path, as_yaml(config))


def _escape(value: Any) -> Any:
    """Write every `${` of a string so that OmegaConf reads it back as it is."""
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
