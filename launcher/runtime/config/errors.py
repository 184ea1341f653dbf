"""Describe the problems of a configuration in one readable line each."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from plumbline.launcher.runtime.config.synonyms import OF_OBJECTIVES, meant_by
from plumbline.model.kinds import nearest

DISCRIMINATORS = ("name", "rope_type")
"""Keys of a section that choose one of several schemas."""

FOLLOWS: dict[tuple[int | str, ...], tuple[tuple[int | str, ...], ...]] = {
    ("model", "num_key_value_heads"): (("model", "num_attention_heads"), ("model", "hidden_size")),
    ("model", "head_dim"): (("model", "num_attention_heads"), ("model", "hidden_size")),
    ("model", "intermediate_size"): (("model", "num_attention_heads"), ("model", "hidden_size")),
    ("model", "max_position_embeddings"): (("data", "sequence_length"), ("data",)),
}
"""Keys that are derived -> the keys that they come from; if those are missing, only they are reported."""


EXAMPLES: dict[tuple[int | str, ...], str] = {
    ("data", "train"): "data.train=[{path: corpora/NAME}]",
    ("parameterization",): "{rule: sp}, or {rule: completep, base_hidden_size: W, base_num_hidden_layers: D} of the "
    "model whose hyperparameters were tuned",
}
"""Place -> an example of its value."""

REASONS: dict[tuple[str, str], str] = {
    ("deepspeed.precision", name): "losses are not scaled, as fp16 would need it" for name in ("fp16", "float16")
}
"""Key and value -> why it is not supported."""


UNKNOWN = "extra_forbidden"  # pydantic's name for an unknown key

EXPECTED: dict[str, str] = {
    "int_type": "a whole number is expected",
    "float_type": "a number is expected",
    "bool_type": "true or false is expected",
    "string_type": "text is expected; numbers, true and null are text in quotes",
    "dict_type": "a section of keys is expected",
    "greater_than": "it has to be greater than {gt:.10g}",
    "greater_than_equal": "it has to be at least {ge:.10g}",
    "less_than": "it has to be less than {lt:.10g}",
    "less_than_equal": "it may be {le:.10g} at most",
    "too_short": "it has {actual_length} of at least {min_length} entries",
    "too_long": "it has {actual_length} of at most {max_length} entries",
    "string_too_short": "it has to have {min_length} characters or more",
}
"""Pydantic's name of a type of problem -> message about the value, formatted with the problem's context."""

EXPONENTS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
"""Letter after a number, as people write sizes -> the power of ten that it stands for."""

KEY = re.compile(r"[a-z_]+ = ")
"""Beginning of a line that names a key of its section."""


class ConfigError(ValueError):
    """Signal a configuration that cannot be used; the message lists every problem on its own line."""


def explain(problems: Iterable[ErrorDetails], schema: type[BaseModel]) -> Iterator[str]:
    """Yield one line for each problem in values for `schema`: path, offending value, remedy.

    Args:
        problems: the result of pydantic's `ValidationError.errors()`. An error raised by one of our checks may have
            several lines.
        schema: what the values were validated against.
    """
    problems = list(problems)
    wrong = {problem["loc"] for problem in problems}
    hints = {each["loc"]: _hint(schema, each["loc"], each["input"]) for each in problems if each["type"] == UNKNOWN}
    meant = {_path_in(hint, path_of(schema, place)[:-1]) for place, hint in hints.items()}
    for problem in problems:
        if problem["type"] == "missing" and wrong.intersection(FOLLOWS.get(problem["loc"], ())):
            continue
        path = ".".join(path_of(schema, problem["loc"]))
        if problem["type"] == "missing":
            if path not in meant:  # else the problem of the other name covers it
                yield f"{path}: missing, and it has no default{_example(problem['loc'])}"
        elif problem["type"] == "value_error":  # one about the whole configuration names the keys itself
            for line in str(problem["ctx"]["error"]).splitlines():
                yield f"{path}{'.' if KEY.match(line) else ': '}{line}" if path else line
        elif problem["type"] == "union_tag_invalid":
            tag, known = problem["ctx"]["tag"], re.findall(r"'(\w+)'", problem["ctx"]["expected_tags"])
            yield f"{path}.{_discriminator(problem)} = {tag}: there is none of that name; {nearest(tag, known, 0.5)}"
        elif problem["type"] == UNKNOWN:
            yield f"{path} = {_as_written(problem['input'])}: unknown key; {hints[problem['loc']]}"
        else:
            off = ", or null" if problem["type"].startswith("greater") and _may_be_null(schema, problem["loc"]) else ""
            yield f"{path} = {_as_written(problem['input'])}: {_expected(problem, path)}{off}"


def _path_in(hint: str, section: list[str]) -> str | None:
    """Return the path of the key that a hint names, perhaps one of the same section, or None if it names none."""
    found = re.search(r"did you mean ([\w.]+)\?", hint)
    if found is None:
        return None
    return found[1] if "." in found[1] else ".".join([*section, found[1]])


def _expected(problem: ErrorDetails, path: str) -> str:
    """Return what was expected instead of an invalid value."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "union_tag_not_found":
        key = _discriminator(problem)
        return f"a section of keys is expected, its {key} among them: {path}.{key}=..."
    if kind in ("model_attributes_type", "model_type"):
        return f"a section of keys is expected{_example(problem['loc'])}"
    if kind == "list_type":
        return f"a list is expected{_example(problem['loc'])}"
    if kind == "string_pattern_mismatch" and problem["loc"][-1:] == ("name",):
        return "a name has letters, digits and . _ + - only, and not dots alone"
    if kind == "literal_error":
        reason = REASONS.get((path, str(problem["input"])))
        return f"it may be {context['expected']}{'' if reason is None else f'; {reason}'}"
    size = re.fullmatch(r"([\d.]+)([kmbgt])", str(problem["input"]).lower())
    if size is not None and kind in ("int_type", "float_type"):
        return f"{EXPECTED[kind]}: write {size[1]}e{EXPONENTS[size[2]]}"
    return EXPECTED[kind].format_map(context) if kind in EXPECTED else problem["msg"]


def _as_written(value: object) -> str:
    """Return a value in YAML's spelling, where Python's differs."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _example(location: tuple[int | str, ...]) -> str:
    """Return a comma and an example for a place in a configuration, if one is known."""
    example = EXAMPLES.get(location[:2])
    return "" if example is None else f", such as {example}"


def path_of(schema: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location in values for `schema` as a user types it."""
    return _follow(schema, location)[0]


def _hint(schema: type[BaseModel], location: tuple[int | str, ...], value: object) -> str:
    """Return what an unknown key may mean: one with a similar name, of another section, or of other trainers."""
    typed, schemas = _follow(schema, location[:-1])
    known, name = list(schemas[0].model_fields) if schemas else [], str(location[-1])
    if typed == ["objective"] and (other := _of_another_objective(schema, name, known)):
        return other
    keys = [str(key) for key in value] if len(location) == 1 and isinstance(value, dict) else []
    if keys and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.8)):
        return f"did you mean {close[0]}?"  # a section with a similar name
    if elsewhere := list(filter(None, (_elsewhere(schema, each) for each in keys or [name]))):
        return " ".join(elsewhere)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"


def _of_another_objective(schema: type[BaseModel], name: str, known: Collection[str]) -> str | None:
    """Return which key of an objective is meant and which objectives have it, or None if there is no such key."""
    key = OF_OBJECTIVES.get(name, name)
    if key in known:
        return f"did you mean objective.{key}?"
    having = [kind for each in _follow(schema, ("objective",))[1] if key in each.model_fields for kind in _names(each)]
    if not having:
        return None
    needed = f"needs objective.name: {' or '.join(filter(None, (', '.join(having[:-1]), having[-1])))}"
    return needed if key == name else f"did you mean objective.{key}? It {needed}"


def _elsewhere(schema: type[BaseModel], name: str) -> str | None:
    """Return where a key that was written in another section belongs in the configuration of a run."""
    sections = {
        key: field.annotation
        for key, field in schema.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    if "optimizer" not in sections:  # of a sweep, a recipe, a task
        return None
    places = [section for section, keys in sections.items() if name in keys.model_fields]
    return f"did you mean {places[0]}.{name}?" if len(places) == 1 else meant_by(name)


def _follow(schema: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return a location in values for `schema` as a user types it, and the schemas that the section there may have.

    If a section's `name` chooses among several schemas, pydantic inserts that name into the location.
    """
    typed: list[str] = []
    schemas = [schema]
    for part in location:
        chosen = [choice for choice in schemas if len(schemas) > 1 and part in _names(choice)]
        if chosen:
            schemas = chosen
            continue
        typed.append(str(part))
        if isinstance(part, str):
            field = schemas[0].model_fields.get(part) if schemas else None
            choices = () if field is None else getattr(field.annotation, "__args__", (field.annotation,))
            schemas = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
    return typed, schemas


def _may_be_null(schema: type[BaseModel], location: tuple[int | str, ...]) -> bool:
    """Return whether the key at a location may be null, which mostly turns off what it sets."""
    schemas = _follow(schema, location[:-1])[1]
    field = schemas[0].model_fields.get(str(location[-1])) if schemas else None
    return field is not None and type(None) in get_args(field.annotation)


def _discriminator(problem: ErrorDetails) -> str:
    """Return the key of a section that chooses one of several schemas."""
    return str(problem["ctx"]["discriminator"]).strip("'")


def _names(schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the values of the key that chooses among schemas in this section, if there is one."""
    keys = [key for key in DISCRIMINATORS if key in schema.model_fields]
    return get_args(schema.model_fields[keys[0]].annotation) if keys else ()
