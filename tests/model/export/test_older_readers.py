"""Older readers find the keys that they know in config.json, with the values of the newer ones."""

import importlib.metadata
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.model.decoder import CausalLM
from plumbline.model.export.native import configuration_plumbline
from plumbline.model.export.older_readers import older_rope_entries, unread_entries
from tests.model.conftest import loaded

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e4}},
            {"rope_theta": 1e4, "rope_scaling": YARN},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 2e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            {"rope_theta": 2e5, "rope_local_base_freq": 1e4},
        ),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 1.0}}, {}),
        ({"model_type": "gpt2"}, {}),
    ],
    ids=["plain", "scaled", "two kinds of layers", "partial", "none"],
)
def test_what_they_look_for_is_there(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert older_rope_entries(config) == expected


def test_what_they_do_not_read_is_said_where_it_matters() -> None:
    usual = {"hidden_act": "silu", "use_sliding_window": False, "rope_theta": 1e4}
    assert unread_entries({**usual, "rope_theta": 5e5}, usual) == ()
    assert unread_entries({**usual, "hidden_act": "gelu"}, usual) == ("hidden_act: gelu",)
    windowed = {"hidden_act": "silu", "use_sliding_window": True}
    assert unread_entries(windowed, usual) == ("use_sliding_window: True",)
    assert unread_entries({"activation_function": "gelu"}, {"activation_function": "gelu_new"})


def test_the_converter_of_llama_cpp_finds_the_length_of_gpt2(
    make_model: Callable[..., CausalLM], tmp_path: Path
) -> None:
    model = make_model(family="gpt2")
    export(loaded(model, tmp_path), tmp_path / "out", "gpt2")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"] == model.config.max_position_embeddings


def test_code_of_its_own_says_which_transformers_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    runpy.run_path(configuration_plumbline.__file__)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "5.3.0")
    with pytest.raises(ImportError, match=r"transformers>=5\.4 is required .*5\.3\.0"):
        runpy.run_path(configuration_plumbline.__file__)
