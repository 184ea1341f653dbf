"""Families fill in, shapes follow, and a bad shape is refused by the name of its field."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from plumbline.model.config import ModelConfig
from plumbline.model.families import FAMILIES

MakeConfig = Callable[..., ModelConfig]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", ("rmsnorm", 1e-6, False, "rope", "swiglu", "head", False, False, False)),
        ("llama", ("rmsnorm", 1e-5, False, "rope", "swiglu", "none", False, False, False)),
        ("gpt2", ("layernorm", 1e-5, True, "learned", "gelu_tanh", "none", True, True, True)),
    ],
)
def test_a_family_names_all_its_switches(make_config: MakeConfig, family: str, expected: tuple[Any, ...]) -> None:
    config = make_config(family=family)
    found = (config.norm, config.norm_eps, config.norm_bias, config.position_embedding, config.mlp, config.qk_norm)
    assert (*found, config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == expected


def test_qwen3_is_the_default_family(make_config: MakeConfig) -> None:
    assert make_config() == make_config(family="qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_explicit_switch_wins_over_the_family(make_config: MakeConfig, family: str) -> None:
    opposite = not make_config(family=family).tie_word_embeddings
    config = make_config(family=family, tie_word_embeddings=opposite, mlp="relu2", norm_eps=1e-3)
    assert (config.tie_word_embeddings, config.mlp, config.norm_eps) == (opposite, "relu2", 1e-3)


def test_null_means_the_family_s_value(make_config: MakeConfig) -> None:
    assert make_config(norm=None, head_dim=None, num_key_value_heads=None) == make_config()


def test_null_wins_over_the_family_where_it_is_a_choice(make_config: MakeConfig) -> None:
    assert make_config(family="shaped").shaped_temperature == 1.0
    config = make_config(family="shaped", shaped_temperature=None)
    assert config.shaped_temperature is None
    assert ModelConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"hidden_size": 96, "num_attention_heads": 6}, (6, 16, 256)),  # 8/3 x 96, already a multiple of 64
        ({"hidden_size": 100, "num_attention_heads": 10}, (10, 10, 320)),  # 266 rounded up to 64
        ({"hidden_size": 100, "num_attention_heads": 10, "mlp": "geglu"}, (10, 10, 320)),
        ({"hidden_size": 100, "num_attention_heads": 10, "mlp": "gelu"}, (10, 10, 400)),
        ({"hidden_size": 96, "num_attention_heads": 6, "family": "gpt2"}, (6, 16, 384)),
        ({"hidden_size": 100, "num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 2}, (2, 8, 320)),
        ({"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 7}, (6, 16, 7)),
    ],
)
def test_shapes_follow_from_the_given_ones(
    make_config: MakeConfig, given: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    config = make_config(**given)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == expected


def test_a_saved_configuration_reads_back_equal(make_config: MakeConfig) -> None:
    config = make_config(family="gpt2", sliding_window=5, final_logit_softcapping=30.0)
    assert ModelConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": 30}, r"hidden_size = 30 does not divide by num_attention_heads = 4.*set head_dim"),
        ({"num_key_value_heads": 3}, r"num_attention_heads = 4 does not divide by num_key_value_heads = 3"),
        ({"head_dim": 5}, r"head_dim = 5 is odd"),
        ({"norm_bias": True}, r"norm_bias = true needs norm: layernorm"),
        ({"hidden_size": 0}, r"hidden_size\n.*greater than 0"),
        ({"hidden_size": "32"}, r"hidden_size\n.*valid integer"),
        ({"num_attention_heads": 0}, r"num_attention_heads\n.*greater than 0"),
        ({"vocab_size": None}, r"vocab_size\n.*Field required"),
        ({"family": "bert"}, r"family = bert: there is none of that name; it is one of qwen3, llama, gpt2, "),
        ({"mlp": "swish"}, r"mlp\n.*'swiglu'"),
        ({"dropout": 1.0}, r"dropout\n.*less than 1"),
        ({"n_embd": 32}, r"n_embd\n.*Extra inputs"),
    ],
)
def test_a_bad_value_is_refused_by_name(make_config: MakeConfig, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(**given)


def test_learned_positions_allow_an_odd_head(make_config: MakeConfig) -> None:
    assert make_config(family="gpt2", head_dim=5).head_dim == 5
