"""Read a configuration: a YAML file, what it extends and the overrides; look up what it leaves open; and save it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.resolve import resolve
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.yaml_files import plain_values, read_yaml, yaml_problems
from plumbline.launcher.runtime.optim.duration import UNITS
from plumbline.launcher.runtime.optim.schedule import with_one_key_each


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read a YAML file, apply its `extends:` chain and the overrides, and fill in what corpora and models decide.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, applied in order; values are parsed as YAML.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown keys, wrong types or values; one line for each problem.
    """
    return resolve(read_values(path, overrides), source=str(path))


def read_values(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the nested plain values of a YAML file, its `extends:` chain and the overrides, as they are written.

    Raises:
        ConfigError: unreadable file, bad YAML, or something that is no override.
    """
    layers = [_read(path), _parse_overrides(overrides)]
    with yaml_problems(str(path)):
        merged = OmegaConf.merge(*layers)
    assert isinstance(merged, DictConfig)
    values: dict[str, Any] = plain_values(merged, str(path))
    return values


def as_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump())))


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back to an equal object."""
    path.write_text(as_yaml(config), encoding="utf-8")


def _escape(value: Any) -> Any:
    """Write every `${` of a string so that OmegaConf reads it back as it is."""
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(path: Path, extended_by: tuple[Path, ...] = ()) -> DictConfig:
    """Merge one YAML file over the file it extends (a path relative to it)."""
    if path.resolve() in extended_by:
        raise ConfigError(f"{path}: extends itself, by way of {' -> '.join(str(step) for step in extended_by)}")
    layer = _layer(read_yaml(path), str(path))
    base = layer.pop("extends", None)
    if base is None:
        return layer
    below = _read(path.parent / str(base), (*extended_by, path.resolve()))
    with yaml_problems(str(path)):
        merged = OmegaConf.merge(below, layer)
    assert isinstance(merged, DictConfig)
    return merged


def _parse_overrides(overrides: list[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"{override!r}: an override is section.key=value, for example optimizer.lr=0.003")
    source = " ".join(overrides)
    with yaml_problems(source):
        return _layer(OmegaConf.from_dotlist(overrides), source)


def _layer(node: DictConfig | ListConfig, source: str) -> DictConfig:
    """Return what is merged over the layers below, so that a duration replaces theirs whole, whatever its unit."""
    values = OmegaConf.to_container(node, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected sections of keys")
    schedule = values.get("schedule")
    if isinstance(schedule, dict):
        try:
            values["schedule"] = schedule = with_one_key_each(schedule)
        except ValueError as error:
            raise ConfigError(f"{source}: schedule: {error}") from error
        _take_other_units_away(schedule.get("branch"), UNITS)
    _take_other_units_away(values.get("train"), ("steps", "tokens"))
    return OmegaConf.create(values)


def _take_other_units_away(section: Any, units: Sequence[str]) -> None:
    """Set the other units of a length to null where one is given."""
    if isinstance(section, dict) and any(section.get(unit) is not None for unit in units):
        section.update({unit: section.get(unit) for unit in units})
