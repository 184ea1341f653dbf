"""Write docs/configuration.md: every key of a configuration with its type, its default and its meaning."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from plumbline.launcher.runtime.config.errors import DISCRIMINATORS
from plumbline.launcher.runtime.config.identity import MARKS, mark_of
from plumbline.launcher.runtime.config.keys import LEFT_OUT, Node, described
from plumbline.launcher.runtime.config.synonyms import SYNONYMS, WITHOUT_KEY

HEAD = """\
# The configuration: every key

`python tests/benchmarks/write_configuration.py` writes this page from the schema, and a test checks that it is up to
date. The description of a key is the docstring of its field in the sources.

A run is configured by one YAML file (`--config FILE`) with the sections below. With `extends: OTHER.yaml`, the file
overrides values of another file, whose path is relative to it. `section.key=value` on the command line overrides both.
Sections are merged key by key, lists are replaced whole, and `SECTION: null` (`SECTION=null`) removes a section.
`${section.key}` inserts the value of another key. An unknown key, a wrong type or an invalid value is an error, and all
errors are reported at once. `python launcher/pretrain.py --config FILE --print-config` prints the resulting
configuration, and the run folder keeps it as `config.yaml`.

The column *when resuming* says what another value does to a run that goes on from a checkpoint: it is *refused*, it
*holds from there on*, or it is *free* and decides nothing of what is trained. [runs.md](runs.md#resuming) has the
further rules: how the mixture in `data.train` may change after all, and what a longer run does to the schedule.

An editor with a YAML language server (VS Code's YAML extension, `yaml-language-server`) completes keys, shows their
descriptions and marks wrong ones, using `configs/schema.json`, which is generated from the same schema. A file in
`configs/` refers to it in its first line. A file elsewhere needs the path from the file to the schema:

```yaml
# yaml-language-server: $schema=schema.json
```

A duration is written `40 steps`, `1e9 tokens` or `2%`. Numbers may have underscores: `10_000_000_000`.
"""
ELSEWHERE = """\
## Names in other trainers

A key with one of these names (from nanoGPT, Megatron-LM, litgpt, torchtitan, transformers, ...) is an error whose
message gives the name used here.

| here | elsewhere |
|---|---|"""


def page() -> str:
    """Return the page."""
    schema = described()
    keys = schema["$defs"]
    headings: dict[str, str] = {}
    lines = [HEAD]
    for section, node in schema["properties"].items():
        for path, names in places(section, node, keys, headings):
            heading = f"{'###' if '.' in path else '##'} {path}"
            lines += [heading, "", *tables(path, [keys[name] for name in names], headings)]
    return "\n".join([*lines, *elsewhere()]).rstrip() + "\n"


def elsewhere() -> Iterator[str]:
    """Yield the table of other trainers' names for our keys."""
    yield ELSEWHERE
    for key, names in SYNONYMS.items():
        yield f"| `{key}` | {', '.join(f'`{name}`' for name in names.split())} |"
    for remedy, others in groupby(WITHOUT_KEY, key=WITHOUT_KEY.__getitem__):
        yield f"| {remedy} | {', '.join(f'`{name}`' for name in others)} |"


def places(path: str, node: Node, keys: dict[str, Node], headings: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Return the headings at and below a path, each with the kinds of keys that first occur there.

    Args:
        path: path of a section.
        node: schema of the section.
        keys: the schema of each kind of keys, by the name of its class.
        headings: class -> heading of the kinds met so far, to which these are added.
    """
    names = [name for name in references(node) if name not in headings]
    headings |= dict.fromkeys(names, path)
    found = [(path, names)] if names else []
    for name in names:
        for key, value in keys[name]["properties"].items():
            found += places(f"{path}.{key}{'[]' if 'items' in value else ''}", value, keys, headings)
    return found


def tables(path: str, kinds: Sequence[Node], headings: dict[str, str]) -> Iterator[str]:
    """Yield the lines on the keys of a section or of a value in one, one kind of keys after the other."""
    for keys in kinds:
        properties = keys["properties"]
        if len(kinds) > 1:
            chosen = next(key for key in properties if key in DISCRIMINATORS)
            yield f"**`{chosen}`: {kind_of(properties[chosen], headings)}**"
            yield ""
        yield keys["description"]
        yield ""
        yield "| key | type | default | when resuming | meaning |"
        yield "|---|---|---|---|---|"
        for key, value in properties.items():
            resumed = when_resuming(f"{path}.{key}")
            cells = (f"`{key}`", kind_of(value, headings), default_of(key, keys), resumed, value["description"])
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""


def when_resuming(path: str) -> str:
    """Return what another value of a key, or of a value in one, does to a run that resumes."""
    section, key = path.replace("[]", "").split(".")[:2]
    return MARKS[mark_of(section, key)][0].partition(":")[0]


def default_of(key: str, keys: Node) -> str:
    """Return the value of a key if it is omitted."""
    value = keys["properties"][key]
    if LEFT_OUT in value:
        return str(value[LEFT_OUT])
    if key in keys.get("required", []):
        return "**required**"
    is_section = isinstance(value["default"], dict) and value["default"]
    return "as below" if is_section else f"`{written(value['default'])}`"


def kind_of(node: Node, headings: dict[str, str]) -> str:
    """Return a description of the possible values."""
    if "$ref" in node:
        name = last(node["$ref"])
        return "duration" if name not in headings else f"[keys](#{anchor(headings[name])})"
    if "enum" in node or "const" in node:
        return either(f"`{written(value)}`" for value in node.get("enum", [node.get("const")]))
    if choices := [*node.get("anyOf", []), *node.get("oneOf", [])]:
        return either(dict.fromkeys(kind_of(choice, headings) for choice in choices))
    if node["type"] == "array":
        exactly = f"{node['minItems']} of " if "maxItems" in node else ""
        return f"list of {exactly}{kind_of(node['items'], headings)}"
    if node["type"] == "object":
        return f"names, each with a {kind_of(node['additionalProperties'], headings)}"
    bounds = ", ".join(f"{sign} {node[word]:g}" for word, sign in BOUNDS.items() if word in node)
    return f"{WORDS[node['type']]} {bounds}".rstrip()


WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true` or `false`", "null": "`null`"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def references(node: Node) -> Iterator[str]:
    """Yield the names of the sections that a value, or the entries of a list, may be."""
    if "$ref" in node and last(node["$ref"]) != "Duration":
        yield last(node["$ref"])
    for choice in [*node.get("anyOf", []), *node.get("oneOf", [])]:
        yield from references(choice)
    if isinstance(node.get("items"), dict):
        yield from references(node["items"])


def written(value: Any) -> str:
    """Return a value as it is written in YAML."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def either(words: Iterable[str]) -> str:
    """Return words joined as in: a, b or c."""
    *first, last_one = words
    return f"{', '.join(first)} or {last_one}" if first else last_one


def last(reference: str) -> str:
    """Return the name of a section in a reference to it."""
    return reference.rpartition("/")[2]


def anchor(heading: str) -> str:
    """Return the anchor of a heading for links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
