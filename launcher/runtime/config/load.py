"""Read a configuration: a YAML file, what it extends, the overrides, and what the corpus decides."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from plumbline.data.config import SourceConfig
from plumbline.launcher.runtime.config.errors import ConfigError, explain
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.stock import section_of


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read a YAML file, apply its `extends:` chain and the overrides, fill in what the corpus decides, validate.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, applied in order; values are parsed as YAML.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown keys, wrong types or values; one line for each problem.
    """
    try:
        merged = OmegaConf.merge(_read(path), _parse_overrides(overrides))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, expected sections of keys")
    _fill_from_model(values)
    _fill_from_data(values)
    return parse_config(values, source=str(path))


def refuse_non_finite(values: Any, source: str) -> None:
    """Raise ConfigError where a float in nested plain values is nan or inf, naming each, with `source` in front.

    This comes before the schema is asked, because its own checks compute with the numbers.
    """
    lines = [f"  {path} = {value}: a finite number is expected" for path, value in _non_finite(values)]
    if lines:
        raise ConfigError("\n".join([f"{source}: {len(lines)} problem(s) in the configuration", *lines]))


def _non_finite(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield path and value of each float that is nan or inf."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _non_finite(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value


def parse_config(values: Any, source: str) -> Config:
    """Validate nested plain values; raise ConfigError naming every problem, with `source` in front."""
    refuse_non_finite(values, source)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [f"  {line}" for line in explain(error, Config)]
        raise ConfigError("\n".join([f"{source}: {len(lines)} problem(s) in the configuration", *lines])) from error


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back to an equal object."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump()))), encoding="utf-8")


def differences(old: BaseModel, new: BaseModel) -> list[str]:
    """`path: old -> new` for each leaf in which two configurations differ."""
    before, after = dict(_leaves(old.model_dump())), dict(_leaves(new.model_dump()))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        f"{path}: {before.get(path)!r} -> {after.get(path)!r}" for path in paths if before.get(path) != after.get(path)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _escape(value: Any) -> Any:
    """The same values with every `${` of a string written so that OmegaConf reads it back as it is."""
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(path: Path, extended_by: tuple[Path, ...] = ()) -> DictConfig:
    """One YAML file merged over the file it extends (a path relative to it)."""
    if path.resolve() in extended_by:
        raise ConfigError(f"{path}: extends itself, by way of {' -> '.join(str(step) for step in extended_by)}")
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError as error:
        known = sorted(str(p) for p in path.parent.glob("*.yaml"))
        raise ConfigError(
            f"{path}: no such file; {path.parent} holds {', '.join(known) or 'no .yaml files'}"
        ) from error
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: expected sections of keys")
    base = config.pop("extends", None)
    if base is None:
        return config
    merged = OmegaConf.merge(_read(path.parent / str(base), (*extended_by, path.resolve())), config)
    assert isinstance(merged, DictConfig)
    return merged


def _parse_overrides(overrides: list[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"{override!r}: an override is section.key=value, for example optimizer.lr=0.003")
    try:
        return OmegaConf.from_dotlist(overrides)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error


def _fill_from_model(values: dict[Any, Any]) -> None:
    """Take a model section without a shape from the model that training starts from (train.initialize_from)."""
    model, train = values.get("model") or {}, values.get("train")
    spec = train.get("initialize_from") if isinstance(train, dict) else None
    if isinstance(spec, str) and isinstance(model, dict) and "hidden_size" not in model:
        values["model"] = {**section_of(spec), **model}


def _fill_from_data(values: dict[Any, Any]) -> None:
    """Take model.vocab_size from the first source and model.max_position_embeddings from the sequence length."""
    model, data = values.get("model"), values.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return
    if model.get("max_position_embeddings") is None and "sequence_length" in data:
        model["max_position_embeddings"] = data["sequence_length"]
    if model.get("vocab_size") is None:
        model["vocab_size"] = _vocab_size(data)


def _vocab_size(data: dict[Any, Any]) -> Any:
    """Of the first corpus or task."""
    sources = data.get("train")
    first = sources[0] if isinstance(sources, list) and sources else {}
    if isinstance(first, dict) and first.get("task") is not None:
        try:
            task = SourceConfig.model_validate(first).task
        except ValidationError:
            return 1  # validation of the whole will say what is wrong with the task
        assert task is not None, "it was given"
        return task.vocab_size
    corpus = None
    try:
        corpus = Path(first["path"])
        return json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))["vocab_size"]
    except (KeyError, TypeError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.vocab_size: not given, and data.train[0].path = {corpus} holds no readable corpus.json to take "
            "it from: prepare the corpus first (launcher/prepare.py) or set model.vocab_size"
        ) from error
