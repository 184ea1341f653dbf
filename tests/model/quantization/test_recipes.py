"""Names of recipes: what each means, sets of them, and errors that show the rule."""

from typing import Any

import pytest
from pydantic import ValidationError

from plumbline.model.quantization.post_training.recipes import SETS, Recipe, named_recipe, recipes
from plumbline.model.quantization.precision import BLOCK_FORMATS
from plumbline.model.quantization.quantizer import Quantizer


def grid(format_: str, granularity: Any, **settings: Any) -> Quantizer:
    """Return a grid as recipes have it: integers use their full range, unless they have zero points."""
    full = format_.startswith("int") and settings.get("symmetric", True)
    return Quantizer(format=format_, granularity=granularity, full_range=full, **settings)


STATIC: dict[str, Any] = {"weights": grid("int8", "channel", scales="fp16"), "static": True}
KEYS, VALUES = grid("int2", "channel"), grid("int2", "token")
DOWN = grid("int8", "token")
MEANINGS: dict[str, dict[str, Any]] = {
    "rtn-w4": {"weights": grid("int4", "channel", scales="fp16")},
    "rtn-w4-g128": {"weights": grid("int4", "group", group_size=128, scales="fp16")},
    "rtn-w4-tensor": {"weights": grid("int4", "tensor", scales="fp16")},
    "rtn-w4-asym": {"weights": grid("int4", "channel", symmetric=False, scales="fp16")},
    "gptq-w3-mse": {"method": "gptq", "weights": grid("int3", "channel", range="mse", scales="fp16")},
    "gptq-w4-g128-actorder": {
        "method": "gptq",
        "weights": grid("int4", "group", group_size=128, scales="fp16"),
        "act_order": True,
    },
    "awq-w4-g128": {"method": "awq", "weights": grid("int4", "group", group_size=128, scales="fp16")},
    "w8a8-static": {**STATIC, "activations": grid("int8", "tensor")},
    "w8a8-static-p99.999": {**STATIC, "activations": grid("int8", "tensor", range="percentile", percentile=99.999)},
    "w8a8-static-asym": {**STATIC, "activations": grid("int8", "tensor", symmetric=False)},
    "w8a8-static-asym-p99.999-wtensor": {
        **STATIC,
        "weights": grid("int8", "tensor", range="mse", scales="fp16"),
        "activations": grid("int8", "tensor", symmetric=False, range="percentile", percentile=99.999),
    },
    "w8a8-dynamic-smooth0.5": {
        "weights": grid("int8", "channel", scales="fp16"),
        "activations": grid("int8", "tensor"),
        "smooth": 0.5,
    },
    "w4a8-token": {"weights": grid("int4", "channel", scales="fp16"), "activations": grid("int8", "token")},
    "w4a4-g32": {
        "weights": grid("int4", "group", group_size=32, scales="fp16"),
        "activations": grid("int4", "group", group_size=32),
    },
    "w4a4-down8": {
        "weights": grid("int4", "channel", scales="fp16"),
        "activations": grid("int4", "token"),
        "inputs": {"down_proj": DOWN, "mlp.c_proj": DOWN, "dense_4h_to_h": DOWN, "fc2": DOWN},
    },
    "fp8-e4m3": {"weights": grid("e4m3", "tensor"), "activations": grid("e4m3", "tensor")},
    "fp8-e4m3-row": {"weights": grid("e4m3", "channel"), "activations": grid("e4m3", "token")},
    "mxfp4": {"weights": BLOCK_FORMATS["mxfp4"], "activations": BLOCK_FORMATS["mxfp4"]},
    "mxfp8_e5m2-w": {"weights": BLOCK_FORMATS["mxfp8_e5m2"]},
    "nvfp4-w": {"weights": BLOCK_FORMATS["nvfp4"]},
    "kv4": {"keys": grid("int4", "tensor"), "values": grid("int4", "tensor")},
    "kv4-head": {"keys": grid("int4", "head"), "values": grid("int4", "head")},
    "kv2-channel": {"keys": KEYS, "values": VALUES},
    "kv2-token-hadamard": {"keys": VALUES, "values": VALUES, "rotate": True},
    "gptq-w4-hadamard": {"method": "gptq", "weights": grid("int4", "channel", scales="fp16"), "rotate": True},
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_name_says_what_the_recipe_does(name: str) -> None:
    assert named_recipe(name) == Recipe(name=name, **MEANINGS[name])


def test_which_recipes_need_text() -> None:
    needy = {name for name in MEANINGS if named_recipe(name).needs_samples}
    assert needy == {name for name in MEANINGS if name.startswith(("gptq", "awq", "w8a8-static")) or "smooth" in name}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtn-w4-g128-tensor", r"(?s)'rtn-w4-g128-tensor' is no recipe; near it: rtn-.*wBaC .*sets of them"),
        ("gptw-w4", r"'gptw-w4' is no recipe; near it: gptq-w4"),
        ("w8a8-static-token", "is no recipe; near it: w8a8-static"),
        ("w8a8-g32-dynamic", "is no recipe"),
        ("kv2-head-channel", "is no recipe"),
        ("fp8-e2m1", "is no recipe"),
        ("w8a8-static-asym-asym", "is no recipe"),
        ("rtn-w44", "recipe rtn-w44: format 'int44' is no number format"),
        ("rtn-w4-actorder", "recipe rtn-w4-actorder: act_order = true, method = rtn: only gptq"),
        ("w8a8-smooth1.5", "recipe w8a8-smooth1.5: smooth Input should be less than or equal to 1"),
        ("rtn-w4-g1.5", "'rtn-w4-g1.5' is no recipe"),
        ("rtn-w4-", "'rtn-w4-' is no recipe; near it: rtn-w4"),
        ("rtn-w4--g32", "'rtn-w4--g32' is no recipe; near it: rtn-w4-g32"),
        ("rtn-w4--hadamard", "'rtn-w4--hadamard' is no recipe"),
        ("hello", r"'hello' is no recipe\. Names are"),
    ],
)
def test_an_unknown_name_shows_the_rule_and_what_is_near(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_recipe(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": {"down_proj": DOWN}}, "exceptions from activations, which are not rounded"),
        ({}, "nothing is rounded"),
    ],
)
def test_recipes_that_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe(name="x", **settings)


def test_a_message_names_the_field() -> None:
    with pytest.raises(ValueError, match="recipe rtn-w4-g0: group_size Input should be greater than 0"):
        named_recipe("rtn-w4-g0")


def test_sets_and_recipes_in_full() -> None:
    names = [recipe.name for recipe in recipes(["weights"])]
    assert names == [*(f"rtn-w{bits}" for bits in range(2, 9)), "gptq-w3", "gptq-w4"]
    full = {"name": "mine", "method": "gptq", "weights": {"format": "int3", "granularity": "channel"}, "damping": 1}
    found = recipes(["rtn-w4", "weights", full, full])
    assert [recipe.name for recipe in found] == ["rtn-w4", *(name for name in names if name != "rtn-w4"), "mine"]
    assert (found[-1].damping, found[-1].weights) == (1.0, Quantizer(format="int3", granularity="channel"))
    assert {recipe.name for each in SETS for recipe in recipes([each])} == set(SETS["all"])
    assert {"w8a8-static-smooth0.8", "mxfp4", "kv3-channel", "w4a4-down8", "awq-w3-g128"} <= set(SETS["all"])
    with pytest.raises(ValueError, match="two recipes have the name rtn-w4"):
        recipes(["rtn-w4", {**full, "name": "rtn-w4"}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "gptq"}, "method = gptq is about weights"),
        ({"static": True}, "static = true is about activations"),
        ({"static": True, "activations": grid("int8", "token")}, "static = true, granularity = token"),
        ({"static": True, "activations": grid("int8", "tensor", range="mse")}, "range = mse: limits can be measured"),
        ({"method": "awq", "weights": grid("int4", "channel"), "smooth": 0.5}, "smooth = 0.5, method = awq: both"),
        ({"weights": grid("int4", "channel"), "damping": 0.1}, "damping = 0.1, method = rtn: only method = gptq"),
        ({"method": "awq", "weights": grid("int4", "channel"), "block_size": 64}, "block_size = 64, method = awq"),
        ({"weights": grid("int4", "token")}, "granularity = token: weights have"),
        ({"inputs": {"down_proj": grid("int4", "head")}}, "granularity = head: activations have"),
        ({"keys": grid("int4", "head"), "values": grid("int4", "group", group_size=4)}, None),
        ({"activations": grid("int4", "head")}, "granularity = head: activations have"),
        ({"method": "obq"}, "method"),
        ({"bits": 4}, "bits"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        Recipe(name="fine", **settings)
        return
    with pytest.raises(ValidationError, match=message):
        Recipe(name="wrong", **settings)
