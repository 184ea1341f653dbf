"""A configuration that was saved is complete, and is read back as it was."""

from pathlib import Path

import yaml
from pydantic import BaseModel

from plumbline.launcher.runtime.config.identity import differences
from plumbline.launcher.runtime.config.load import load_config, save_config
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.schema import Config

AWKWARD = [
    "1e3",
    "null",
    "true",
    "0x10",
    "a: b",
    "# no",
    "'\"",
    "naïve ☃",
    "two\nlines\t",
    "${HOME}",
    "x \\${y}",
    " ",
    "",
]


def test_a_saved_configuration_loads_to_an_equal_one(tiny_config: Path, tmp_path: Path) -> None:
    values = load_config(tiny_config, []).model_dump()
    values["train"]["sample_prompts"] = AWKWARD
    values["optimizer"] |= {"lr": 1e-3 / 3, "eps": 1e-30}
    config = parse(Config, values, source="here")
    save_config(config, tmp_path / "saved.yaml")
    loaded = load_config(tmp_path / "saved.yaml", [])
    assert loaded.train.sample_prompts == AWKWARD
    assert loaded == config
    assert differences(loaded, config) == []


def test_a_saved_configuration_is_complete(tiny_config: Path, tmp_path: Path) -> None:
    save_config(load_config(tiny_config, []), tmp_path / "saved.yaml")
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())
    assert set(saved) == set(Config.model_fields)
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            assert set(saved[name]) == set(field.annotation.model_fields), name
