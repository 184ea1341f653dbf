"""Every key is explained, the page and the schema for editors are those of the sources, and editors may trust it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from plumbline.launcher.runtime.config.keys import described, for_editors, nodes
from plumbline.launcher.runtime.config.load import as_yaml, load_config
from plumbline.launcher.runtime.config.schema import Config
from tests.benchmarks import write_configuration
from tests.conftest import REPOSITORY

CONFIGS = [
    file
    for file in sorted((REPOSITORY / "configs").rglob("*.yaml"))
    if yaml.safe_load(file.read_text(encoding="utf-8")).keys() <= {*Config.model_fields, "extends"}
]


@pytest.fixture(scope="module")
def editor() -> Draft7Validator:
    """Return what an editor checks a file with."""
    return Draft7Validator(for_editors())


def keys_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, keys in schema["$defs"].items():
        for key, value in keys.get("properties", {}).items():
            yield f"{kind}.{key}", value


def test_every_key_has_a_meaning_in_whole_sentences() -> None:
    found = dict(keys_of(described()))
    assert len(found) > 200
    meanings = {path: value.get("description", "") for path, value in found.items()}
    assert {path: text for path, text in meanings.items() if not text.endswith((".", ".)"))} == {}
    assert {path: text for path, text in meanings.items() if "None" in text} == {}, "a file says null"


def test_every_key_says_what_it_is_when_it_is_left_out(tiny_config: Path) -> None:
    required = {
        f"{kind}.{key}"
        for kind, keys in described()["$defs"].items()
        for key in keys.get("required", [])
        if "left_out" not in keys["properties"][key]
    }
    in_sections = {
        f"{type(getattr(load_config(tiny_config, []), section)).__name__}.{key}"
        for section, values in yaml.safe_load(tiny_config.read_text(encoding="utf-8")).items()
        for key in values
    }
    optional = (
        "Scaling.",
        "Quantizer.",
        "WeightChange.",
        "BatchStage.",
        "BranchConfig.",
        "LocalCheckpointConfig.",
        "ProfileConfig.",
    )
    chosen = ("SilentThoughtsConfig.name", "FileConfig.path", "ProsqaConfig.path")
    assert {path for path in required if not any(word in path for word in optional)} - {*chosen} <= in_sections


def test_the_page_and_the_schema_are_those_of_the_sources() -> None:
    for file, wanted in write_configuration.written().items():
        assert file.read_text(encoding="utf-8") == wanted, f"{file}: run python tests/benchmarks/write_configuration.py"


def test_the_page_has_every_key_and_its_links_lead_somewhere() -> None:
    text = write_configuration.PAGE.read_text(encoding="utf-8")
    for path, value in keys_of(described()):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{path.partition('.')[2]}` |"))
        assert row.count(" | ") >= 3, row
        assert value["description"].partition("|")[0] in text, path
    headings = {line.lstrip("# ") for line in text.splitlines() if line.startswith("##")}
    anchors = {"".join(char for char in heading if char.isalnum() or char in "_-") for heading in headings}
    links = {link.partition(")")[0] for link in text.split("](#")[1:]}
    assert links
    assert links <= anchors


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_an_editor_finds_nothing_wrong_with_our_files(file: Path, editor: Draft7Validator) -> None:
    schema = write_configuration.SCHEMA
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    assert first == f"# yaml-language-server: $schema={os.path.relpath(schema, file.parent)}"
    errors = editor.iter_errors(yaml.safe_load(file.read_text(encoding="utf-8")))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_an_editor_finds_nothing_wrong_with_what_a_run_keeps(tiny_config: Path, editor: Draft7Validator) -> None:
    values = yaml.safe_load(as_yaml(load_config(tiny_config, [])))
    assert list(editor.iter_errors(values)) == []


@pytest.mark.parametrize(
    ("section", "values", "fits"),
    [
        ("train", {"steps": "600_000"}, True),  # what YAML 1.2 makes of it
        ("schedule", {"warmup": "2%", "decay": "3 steps"}, True),
        ("precision", {"weights": 4, "kv_cache": "mxfp8"}, True),
        ("objective", {"z_loss": 0.1}, True),
        ("model", {"attention": "pruned"}, True),
        ("train", {"stepz": 3}, False),
        ("train", {"steps": "many"}, False),
        ("train", {"steps": 0}, False),
        ("schedule", {"warmup": "2 miles"}, False),
        ("model", {"attention": "prunedd"}, False),
        ("objective", {"name": "next_token", "horizon": 2}, False),
        ("data", {"train": [{"task": {"name": "maze", "sides": 3}}]}, False),
    ],
)
def test_an_editor_marks_what_a_run_would_refuse(
    section: str, values: dict[str, Any], fits: bool, editor: Draft7Validator
) -> None:
    assert editor.is_valid({section: values}) == fits


def test_nothing_of_ours_is_left_in_the_schema_for_editors(editor: Draft7Validator) -> None:
    Draft7Validator.check_schema(editor.schema)
    words = {word for node in nodes(editor.schema) for word in node}
    assert not words & {"shapes", "left_out", "title", "required", "oneOf", "discriminator"}
