"""Define what makes a run the same run: every key of the configuration has a mark, declared with its field.

A field is marked where it is declared, by `json_schema_extra={"shapes": MARK}`. A field without a mark has that of its
section, and every section has one in `Config`. Configurations are compared by mark:

- a run can be resumed if the keys of RESUMED are equal; so can a branch continue its parent, except that
  `schedule.branch` differs and `precision` may (checkpoint/branch.py);
- a requested run is complete if the keys of TRAINED are those that it was trained with (run/folder.py);
- checkpoints can be averaged if the keys that shape the model are equal (models/averages.py);
- cells of a sweep are the same run if the keys of TRAINED are equal, `parameterization` and `horizon` by their results,
  and `data.micro_batch_size` too, because cells are compared to the last bit (sweep/cells.py).
"""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from plumbline.launcher.runtime.config.schema import Config

MARKS = {
    "model": ("refused: another model", "refused"),
    "run": ("refused: another run", "refused"),
    "state": ("refused: the saved optimizer state would not fit", "refused"),
    "course": ("holds from there on", "refused: nothing would be trained"),
    "nothing": ("free", "free"),
}
"""Mark -> effect of changing such a key in a resumed run and in a complete one."""

RESUMED = ("model", "run", "state")
"""Marks of the keys that must not change until a run ends."""

TRAINED = (*RESUMED, "course")
"""Marks of the keys that define what was trained."""

BESIDE_STEPS = (
    "data.validation",
    "deepspeed.timeout_minutes",
    "guards.",
    "train.eval_batches",
    "train.eval_interval",
    "train.log_interval",
    "train.sample_prompts",
)
"""Beginnings of those keys of TRAINED that do not affect training steps."""


def mark_of(section: str, key: str | None = None) -> str:
    """Return the mark of one key of a section, or of the section itself."""
    field = Config.model_fields[section]
    for schema in _schemas(field):
        if key in schema.model_fields and (mark := _mark(schema.model_fields[key])) is not None:
            return mark
    mark = _mark(field)
    assert mark is not None, f"{section}: a section needs a mark in config/schema.py"
    return mark


def changes(old: Config, new: Config, marks: Collection[str] = tuple(MARKS)) -> dict[str, tuple[Any, Any]]:
    """Return path -> both values of each leaf with one of `marks` in which two configurations differ."""
    before, after = dict(_leaves(old, marks)), dict(_leaves(new, marks))
    both = {path: (before.get(path), after.get(path)) for path in {**before, **after}}
    return dict(chain.from_iterable(_apart(path, *values) for path, values in both.items()))


def _apart(path: str, was: Any, becomes: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield path and both values where two values differ, also inside sections and equally long lists of sections."""
    if was == becomes:
        return
    if isinstance(was, dict) and isinstance(becomes, dict):
        parts = [(key, was.get(key), becomes.get(key)) for key in {**was, **becomes}]
    elif _are_sections(was) and _are_sections(becomes) and len(was) == len(becomes):
        parts = [(str(number), *values) for number, values in enumerate(zip(was, becomes, strict=True))]
    else:
        yield path, (was, becomes)
        return
    for key, *values in parts:
        yield from _apart(f"{path}.{key}", *values)


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def differences(old: Config, new: Config, marks: Collection[str] = tuple(MARKS)) -> list[str]:
    """Return `section.key: old -> new` for each leaf with one of `marks` in which two configurations differ."""
    return [f"{path}: {was!r} -> {becomes!r}" for path, (was, becomes) in changes(old, new, marks).items()]


def makes_other_steps(path: str) -> bool:
    """Return whether another value of a key may change training steps when they are repeated."""
    section, _, key = path.partition(".")
    if section not in Config.model_fields or path.startswith(BESIDE_STEPS):
        return False
    return path == "data.micro_batch_size" or mark_of(section, key.partition(".")[0]) in TRAINED


def settings(config: Config) -> dict[str, Any]:
    """Return the value of every leaf by its path, section.key."""
    return dict(_leaves(config, MARKS))


def table() -> str:
    """Return the table of docs/runs.md: the effect of changing each key."""
    rows = [f"| {', '.join(_keys_of(mark))} | {resumed} | {complete} |" for mark, (resumed, complete) in MARKS.items()]
    return "\n".join(["| a change of | when resuming | when complete |", "|---|---|---|", *rows])


def _leaves(config: Config, marks: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf whose key has one of `marks`."""
    for section, values in config.model_dump().items():
        for key, value in values.items():
            if mark_of(section, key) in marks:
                yield from _leaves_below(f"{section}.{key}", value)


def _leaves_below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves_below(f"{path}.{key}", child)
    else:
        yield path, value


def _keys_of(mark: str) -> Iterator[str]:
    """Yield descriptions of the keys with a mark: whole sections, the rest of sections, single keys."""
    for section, field in Config.model_fields.items():
        marked = {
            key: own for schema in _schemas(field) for key, info in schema.model_fields.items() if (own := _mark(info))
        }
        if mark_of(section) != mark:
            yield from (f"`{section}.{key}`" for key, own in marked.items() if own == mark)
        elif marked:
            yield f"the rest of `{section}`"
        else:
            yield f"`{section}`"


def _schemas(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the schemas that a section may have: several if its `name` chooses one."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _mark(field: FieldInfo) -> str | None:
    """Return the mark on the field itself."""
    extra = field.json_schema_extra
    mark = extra.get("shapes") if isinstance(extra, dict) else None
    return None if mark is None else str(mark)
