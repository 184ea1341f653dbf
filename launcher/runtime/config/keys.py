"""Describe every key of a configuration as a JSON Schema, for the documentation and for editors.

Types, defaults and meanings are those of the schema's fields. Meanings are read from the sources here, since pydantic
would read them at the start of every command. What only checks know is added: names of kinds, the spelling of
durations, short spellings, and the effect of omitting a key.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import pairwise
from textwrap import dedent
from typing import Any, get_args

from pydantic import BaseModel

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.duration import WRITTEN, Duration
from plumbline.launcher.runtime.optim.optimizer import OPTIMIZERS
from plumbline.launcher.runtime.optim.schedule import COOLDOWNS, SHAPES
from plumbline.model.attention import ATTENTIONS
from plumbline.model.blocks import BLOCKS
from plumbline.model.config import ModelConfig
from plumbline.model.families import FAMILIES

Node = dict[str, Any]
"""A JSON Schema, or a part of one."""

KINDS: dict[tuple[str, str], Iterable[str]] = {
    ("ModelConfig", "family"): FAMILIES,
    ("ModelConfig", "block"): BLOCKS,
    ("ModelConfig", "attention"): ATTENTIONS,
    ("OptimizerConfig", "name"): OPTIMIZERS,
    ("ScheduleConfig", "name"): SHAPES,
    ("ScheduleConfig", "cooldown"): COOLDOWNS,
}
"""Keys whose values are the names in a table."""

LEFT_OUT = "left_out"
"""Key of a field's `json_schema_extra` with the value of an omitted key, if it is not a plain default."""

OURS = ("title", "shapes", LEFT_OUT, "discriminator")
"""Schema entries that editors do not need."""


def described() -> Node:
    """Return the JSON Schema of a whole configuration."""
    schema = Config.model_json_schema()
    keys = schema["$defs"]
    for kind in sections_in(Config):
        properties = (schema if kind is Config else keys[kind.__name__])["properties"]
        properties |= {key: {"description": text, **properties[key]} for key, text in meanings(kind).items()}
    keys["Duration"] = {"type": "string", "pattern": f"^{WRITTEN.pattern}$"}
    for (section, key), names in KINDS.items():
        keys[section]["properties"][key]["enum"] = [*names]
    for site in ("weights", "activations", "kv_cache"):
        keys["PrecisionConfig"]["properties"][site]["anyOf"][:0] = [{"type": "integer"}, {"type": "string"}]
    family = ModelConfig.model_fields["family"].default
    for key, value in FAMILIES[family].items():
        shown = value if isinstance(value, str) else json.dumps(value)
        keys["ModelConfig"]["properties"][key][LEFT_OUT] = f"by `family`: `{shown}` in {family}"
    for node in nodes(schema):
        if node.get("$ref") == "#/$defs/Duration" and "default" in node:
            node["default"] = str(Duration(**node["default"]))
        if isinstance(node.get("description"), str):
            node["description"] = as_in_yaml(node["description"])
    return schema


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of all sections that a value of some type may hold, some of them more than once."""
    parts = get_args(annotation)
    if not parts and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        parts = tuple(field.annotation for field in annotation.model_fields.values())
    for part in parts:
        yield from sections_in(part)


def meanings(kind: type[BaseModel]) -> dict[str, str]:
    """Return key -> the text below its field in the source of a class, or of one that the class extends."""
    found: dict[str, str] = {}
    for extended in reversed(kind.__mro__[: kind.__mro__.index(BaseModel)]):
        (source,) = ast.parse(dedent(inspect.getsource(extended))).body
        assert isinstance(source, ast.ClassDef)
        for field, below in pairwise(source.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(key)), ast.Expr(ast.Constant(str(text))) if key in kind.model_fields:
                    found[key] = inspect.cleandoc(text)
    return found


def for_editors() -> Node:
    """Return the JSON Schema of a file, which may omit what its base file or the command line sets."""
    schema = deepcopy(described())
    for key, section in schema["properties"].items():  # null removes that of the base file
        schema["properties"][key] = {"anyOf": [section, {"type": "null"}]}
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "A file that this one is laid over, by its path from this one.",
    }
    for node in [*nodes(schema)]:
        for word in (*OURS, "required"):
            node.pop(word, None)
        if "oneOf" in node:  # without the choosing name, several may match
            node["anyOf"] = node.pop("oneOf")
        if node.get("type") == "integer":  # 1_000_000 is a string to an editor
            number = {word: node.pop(word) for word in (*node,) if word not in ("description", "default")}
            node["anyOf"] = [number, {"type": "string", "pattern": r"^\d[\d_]*$"}]
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def nodes(schema: Any) -> Iterator[Node]:
    """Yield a schema and all its nested schemas."""
    yield schema
    for word in ("properties", "$defs"):
        for child in schema.get(word, {}).values():
            yield from nodes(child)
    for word in ("anyOf", "oneOf"):
        for child in schema.get(word, []):
            yield from nodes(child)
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from nodes(schema[word])


def as_in_yaml(text: str) -> str:
    """Return a docstring with one line per paragraph and Python's constants in YAML's spelling."""
    spelled = re.sub(r"\bNone\b", "null", re.sub(r"(?<!\n)\n(?!\n)", " ", text))
    return re.sub(r"\b(True|False)\b", lambda match: match[0].lower(), spelled)
