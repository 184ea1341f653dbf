"""Older readers find the keys that they know in config.json, with the values of the newer ones."""

from typing import Any

import pytest

from plumbline.model.export.older_readers import older_entries, unread_entries

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
        ({"model_type": "gpt2", "n_positions": 64}, {"n_ctx": 64}),
        ({"model_type": "cohere"}, {}),
    ],
    ids=["plain", "scaled", "two kinds of layers", "partial", "GPT-2", "none"],
)
def test_what_they_look_for_is_there(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert older_entries(config) == expected


def test_what_they_do_not_read_is_said_where_it_matters() -> None:
    usual = {"hidden_act": "silu", "use_sliding_window": False, "rope_theta": 1e4}
    assert unread_entries({**usual, "rope_theta": 5e5}, usual) == ()
    assert unread_entries({**usual, "hidden_act": "gelu"}, usual) == ("hidden_act: gelu",)
    windowed = {"hidden_act": "silu", "use_sliding_window": True}
    assert unread_entries(windowed, usual) == ("use_sliding_window: True",)
    assert unread_entries({"activation_function": "gelu"}, {"activation_function": "gelu_new"})
