"""Parse nested plain values into a configuration, strictly, without reading a file or building a model."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from plumbline.launcher.runtime.config.errors import ConfigError, explain, path_of
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.synonyms import meant_by

MOST = 40
"""Most problems that one message lists."""
SHAPE = {"hidden_size", "num_hidden_layers", "num_attention_heads"}
"""Keys of a model without which it has no shape."""

Schema = TypeVar("Schema", bound=BaseModel)


def parse(schema: type[Schema], values: Any, source: str) -> Schema:
    """Return the object of a schema that nested plain values describe.

    Raises:
        ConfigError: names every problem, one for each line, with `source` in front.
    """
    refuse_non_finite(values, source)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _refusal(error.errors(), schema, source) from error


def check_written(values: dict[str, Any], source: str) -> None:
    """Refuse invalid values; those that a corpus or an initial model determines may be missing.

    Raises:
        ConfigError: names every problem, one for each line, with `source` in front.
    """
    if not Config.model_fields.keys() & values:
        sections = ", ".join(Config.model_fields)
        known = "".join(f"\n  {key}: {hint}" for key in values if (hint := meant_by(str(key), alone=True)))
        raise ConfigError(f"{source}: no configuration of a run: it has none of the sections {sections}{known}")
    refuse_non_finite(values, source)
    model = values.get("model")
    if isinstance(model, dict) and model.get("vocab_size") is None:
        values = {**values, "model": {**model, "vocab_size": 1}}  # no check depends on it
    try:
        Config.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        if takes_shape_from_stock(values):
            absent = {"missing", "model_type"} if values.get("model") is None else {"missing"}
            problems = [each for each in problems if each["loc"][:1] != ("model",) or each["type"] not in absent]
        if problems:
            raise _refusal(problems, Config, source) from error


def with_whole_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with whole floats as integers where integers are expected, such as 1e9 tokens.

    YAML reads 1e9 and 4e1 as floats.
    """
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for problem in error.errors():
            number = problem["input"]
            if problem["type"] == "int_type" and isinstance(number, float) and number.is_integer():
                values = _replaced(values, path_of(Config, problem["loc"]), int(number))
    return values


def _replaced(values: Any, path: Sequence[str], value: Any) -> Any:
    """Return nested plain values with the value at a path replaced."""
    if not path:
        return value
    copy = [*values] if isinstance(values, list) else {**values}
    key: Any = int(path[0]) if isinstance(values, list) else path[0]
    copy[key] = _replaced(values[key], path[1:], value)
    return copy


def takes_shape_from_stock(values: dict[str, Any]) -> bool:
    """Return whether what the model section leaves out is to be taken from the model that training starts from."""
    model, train = values.get("model") or {}, values.get("train")
    starts_from_stock = isinstance(train, dict) and train.get("initialize_from") is not None
    return starts_from_stock and isinstance(model, dict) and not model.keys() >= SHAPE


def refuse_non_finite(values: Any, source: str) -> None:
    """Refuse every float that is nan or inf, before the schema's own checks compute with the numbers.

    Raises:
        ConfigError: names each of them, one for each line, with `source` in front.
    """
    lines = [f"{path} = {value}: a finite number is expected" for path, value in _non_finite(values)]
    if lines:
        raise ConfigError(_message(source, lines))


@contextmanager
def option_problems(option: str, schema: type[BaseModel]) -> Iterator[None]:
    """Turn a schema's errors about an option's value into a ConfigError of one line, with `option` in front."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{option}: {'; '.join(explain(error.errors(), schema))}") from error


def _non_finite(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield path and value of each float that is nan or inf."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _non_finite(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value


def _refusal(problems: Sequence[ErrorDetails], schema: type[BaseModel], source: str) -> ConfigError:
    return ConfigError(_message(source, list(explain(problems, schema))))


def _message(source: str, lines: list[str]) -> str:
    shown = lines if len(lines) <= MOST else [*lines[:MOST], f"... and {len(lines) - MOST} more"]
    return "\n  ".join([f"{source}: {len(lines)} problem(s) in the configuration", *shown])
