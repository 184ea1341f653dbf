"""Derive wrong values for every key of the configuration from its schema: other types, out of range, misspelled."""

from collections.abc import Iterator, Mapping
from typing import Any

from plumbline.launcher.runtime.config.schema import Config

Node = Mapping[str, Any]
NUMBERS = ("integer", "number")
OTHERS = {"null": "null", "string": "word", "array": "[1]", "object": "{a: 1}", "boolean": "true"}
"""Type -> a value of it, which is wrong for a key of other types."""


def wrong_overrides() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (overrides, the key that the error must name), every one of which must be refused."""
    whole = Config.model_json_schema()
    for section, node in whole["properties"].items():
        for wrong in ("word", "[1, 2]", "7"):
            yield (f"{section}={wrong}",), section
        for path, choice, leaf in leaves(section, node, whole["$defs"]):
            chosen = (f"{choice['path']}.{choice['key']}={choice['value']}",) if choice else ()
            for wrong in _wrong(leaf, whole["$defs"]):
                if wrong == "null" and section == "model":  # there it leaves a key to the family
                    continue
                yield (*chosen, f"{path}={wrong}"), path
            yield (*chosen, f"{path}x=1"), f"{path}x"


def leaves(path: str, node: Node, known: Node, choice: Node | None = None) -> Iterator[tuple[str, Node, Node]]:
    """Yield path, choice of a schema and node of every key that holds no section."""
    node = _followed(node, known)
    if set(node.get("properties", ())) == {"amount", "unit"}:  # a duration, which is written as text
        yield path, choice or {}, {"type": "duration"}
        return
    if "discriminator" in node:
        key = node["discriminator"]["propertyName"]
        for value, reference in node["discriminator"]["mapping"].items():
            yield from leaves(path, {"$ref": reference}, known, {"path": path, "key": key, "value": value})
        return
    sections = [_followed(each, known) for each in node.get("anyOf", [node])]
    for each in sections:
        if "discriminator" in each:
            yield from leaves(path, each, known, choice)
        for key, child in each.get("properties", {}).items():
            if choice is None or key != choice["key"]:
                yield from leaves(f"{path}.{key}", child, known, choice)
    if not any("properties" in each or "discriminator" in each for each in sections):
        yield path, choice or {}, node


def _followed(node: Node, known: Node) -> Node:
    return {**known[node["$ref"].rpartition("/")[2]], **node} if "$ref" in node else node


def alternatives(leaf: Node, known: Node) -> list[Node]:
    """Return the schemas that a value of a key may have, such as that of a number and that of null."""
    return [_followed(each, known) for each in leaf.get("anyOf", [leaf])]


def _wrong(leaf: Node, known: Node) -> Iterator[str]:
    """Yield wrong values of a key, as YAML."""
    kinds = alternatives(leaf, known)
    types = {each.get("type") for each in kinds}
    if types == {"duration"}:
        yield from ("word", "7", "-1 steps", "2 epochs", "101%", "[1]", "{a: 1}", "true", "1.5 steps")
        return
    yield from (text for kind, text in OTHERS.items() if kind not in types)
    if types & {*NUMBERS}:
        yield from (".nan", "-1e400")
    if "integer" in types and "number" not in types:
        yield "1.5"
    if not types & {*NUMBERS, "string"}:
        yield "7"
    for each in kinds:
        yield from _beyond(each)


def _beyond(kind: Node) -> Iterator[str]:
    """Yield values of the right type that are not among those that a key may have."""
    if "enum" in kind or "const" in kind:
        yield "none_such"
    for key, step in (("exclusiveMinimum", 0), ("minimum", -1), ("exclusiveMaximum", 0), ("maximum", 1)):
        if key in kind:
            yield str(kind[key] + step)
