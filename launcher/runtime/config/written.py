"""Read the written values of a configuration: a YAML file, its base files and the overrides.

Nothing here imports torch, so that the place of a run is known in a fraction of a second.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import ValidationError

from plumbline.launcher.runtime.config.errors import ConfigError, explain
from plumbline.launcher.runtime.config.sections import RunConfig
from plumbline.launcher.runtime.config.synonyms import meant_by
from plumbline.launcher.runtime.config.yaml_files import check_numbers, plain_values, read_yaml, yaml_problems
from plumbline.launcher.runtime.optim.duration import UNITS


def read_run(path: Path, overrides: list[str]) -> RunConfig:
    """Return only the run section of a configuration.

    Raises:
        ConfigError: unreadable file, bad YAML, an invalid override, or an invalid run section.
    """
    try:
        return RunConfig.model_validate(read_values(path, overrides).get("run") or {})
    except ValidationError as error:
        raise ConfigError(f"{path}: run: {'; '.join(explain(error.errors(), RunConfig))}") from error


def read_values(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the nested plain values of a YAML file, its `extends:` chain and the overrides, as written.

    Raises:
        ConfigError: unreadable file, bad YAML, a number in another base than 10, or an invalid override.
    """
    file = _read(path)
    if "grids" in file:
        raise ConfigError(f"{path}: is a sweep, which trains many runs: launcher/sweep.py --config {path}")
    overrides = _take_away(file, [_dotted(override) for override in overrides])
    for override in overrides:
        with yaml_problems(override):
            check_numbers(override.partition("=")[2], override)
    into_lists = [override for override in overrides if _enters_list(file, override)]
    others = _parse_overrides([override for override in overrides if override not in into_lists])
    with yaml_problems(str(path)):
        merged = OmegaConf.merge(file, others)
    written = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(written, dict)
    for override in into_lists:
        _set(written, override)
    values: dict[str, Any] = plain_values(OmegaConf.create(written), str(path))
    return values


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


def _dotted(override: str) -> str:
    """Return an override with list entries in our notation: data.train.0.path for data.train[0].path."""
    key, equals, value = override.partition("=")
    return re.sub(r"\[(\d+)\]", r".\1", key) + equals + value


def _take_away(file: DictConfig, overrides: list[str]) -> list[str]:
    """Blank each section of a file that an override `SECTION=null` removes, and return the remaining overrides.

    Overrides of the section before that are removed too; those after it count.
    """
    left: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if "." in key or value.strip().lower() not in ("null", "~"):
            left.append(override)
            continue
        file[key] = None
        left = [each for each in left if not each.startswith(f"{key}.")]
    return left


def _parse_overrides(overrides: list[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or "." not in key or not all(key.split(".")):
            usual = ", for example optimizer.lr=0.003, or SECTION=null"
            hint = f"; {meant}" if (meant := meant_by(key, alone=True)) else usual
            raise ConfigError(f"{override!r}: an override is section.key=value{hint}")
    source = " ".join(overrides)
    with yaml_problems(source):
        return _layer(OmegaConf.from_dotlist(overrides), source)


def _enters_list(file: DictConfig, override: str) -> bool:
    """Return whether the key of an override leads to a list of the file, or to an entry of one: data.train.0.path."""
    node: Any = OmegaConf.to_container(file, resolve=False)
    for part in override.partition("=")[0].split("."):
        node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, list):
            return True
    return False


def _set(values: Any, override: str) -> None:
    """Replace the value that an override addresses in nested plain values; list entries are counted from 0.

    Raises:
        ConfigError: the address does not exist, or the value is not YAML.
    """
    key, _, text = override.partition("=")
    *parents, last = key.split(".")
    with yaml_problems(override):
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(value, dict)
    for part in parents:
        place = _place(values, part, override)
        values = values.setdefault(place, {}) if isinstance(values, dict) else values[place]
    values[_place(values, last, override)] = value["value"]


def _place(values: Any, part: str, override: str) -> str | int:
    """Return the key or list index that a part of an override names."""
    if isinstance(values, dict):
        return part
    if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
        return int(part)
    held = f"{len(values)} entries, counted from 0" if isinstance(values, list) else f"{values!r}, no section"
    raise ConfigError(f"{override}: there is no {part} there, but {held}")


def _layer(node: DictConfig | ListConfig, source: str) -> DictConfig:
    """Return the layer to merge over those below, in which a length replaces theirs in any unit."""
    values = OmegaConf.to_container(node, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected sections of keys")
    schedule = values.get("schedule")
    if isinstance(schedule, dict):
        _take_other_units_away(schedule.get("branch"), UNITS)
    _take_other_units_away(values.get("train"), ("steps", "tokens"))
    return OmegaConf.create(values)


def _take_other_units_away(section: Any, units: Sequence[str]) -> None:
    """Set the other units of a length to null where one is given."""
    if isinstance(section, dict) and any(section.get(unit) is not None for unit in units):
        section.update({unit: section.get(unit) for unit in units})
