"""Which settings of the parameterization draw a word of warning, and which do not."""

from collections.abc import Callable
from typing import Any

import pytest

from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.cautions import cautions
from plumbline.model.parameterization.config import ParameterizationConfig

MakeConfig = Callable[..., ModelConfig]
RULE: dict[str, Any] = {"rule": "completep", "base_hidden_size": 32, "base_num_hidden_layers": 3}


def cautions_of(model: ModelConfig, **changes: Any) -> list[str]:
    return list(cautions(model, ParameterizationConfig.model_validate({**RULE, **changes})))


@pytest.mark.parametrize(
    ("heads", "base", "warned"),
    [
        (16, {}, False),  # four times the heads, as the width
        (4, {}, True),  # or one head of the base's, four times as wide
        (6, {}, True),  # one and a half heads of the base's
        (4, {"base_head_dim": 8}, False),
        (4, {"base_head_dim": 32}, False),
        (16, {"base_num_attention_heads": 4}, False),
        (4, {"base_num_attention_heads": 4}, True),
        (4, {"rule": "sp"}, False),
    ],
)
def test_heads_that_may_have_grown_in_silence(
    make_config: MakeConfig, heads: int, base: dict[str, Any], warned: bool
) -> None:
    found = cautions_of(make_config(hidden_size=128, num_attention_heads=heads, head_dim=32), **base)
    assert [("base_head_dim=32" in text) for text in found] == [True] * warned


@pytest.mark.parametrize(
    ("shape", "base", "warned"),
    [
        ({"num_key_value_heads": 1}, {}, ["num_key_value_heads=1", "from 0.25 at"]),
        ({"num_key_value_heads": 1}, {"base_num_key_value_heads": 1}, []),
        ({"num_key_value_heads": 1}, {"rule": "sp"}, []),
        ({"num_key_value_heads": 4}, {}, []),  # as many as the base had queries, which then shared none
        ({"num_key_value_heads": 8}, {}, []),  # more than the base had queries: they grew
        (
            {"num_key_value_heads": 8},
            {"base_num_attention_heads": 16, "base_head_dim": 32},
            ["num_key_value_heads=8", "from 2 at"],
        ),
        ({"num_attention_heads": 64, "num_key_value_heads": 8}, {}, ["num_key_value_heads=8", "from 2 at"]),
        ({"num_attention_heads": 64, "num_key_value_heads": 32}, {}, []),
        ({"num_attention_heads": 4}, {"base_head_dim": 32}, []),
        ({"num_attention_heads": 6}, {"base_head_dim": 32}, ["num_key_value_heads=6", "from 1.5 at"]),
        ({"intermediate_size": 350}, {}, ["intermediate_size=350", "from 87.5 at"]),
        ({"intermediate_size": 350}, {"base_intermediate_size": 350}, []),
        ({"intermediate_size": 350}, {"base_hidden_size": 128}, []),
        ({"hidden_size": 160, "num_attention_heads": 20, "intermediate_size": 448}, {}, []),  # 8/3, each time rounded
    ],
)
def test_sizes_that_may_have_stayed_while_the_width_grew(
    make_config: MakeConfig, shape: dict[str, Any], base: dict[str, Any], warned: list[str]
) -> None:
    grown = {"hidden_size": 128, "num_attention_heads": 16, "head_dim": 32, "intermediate_size": 352}
    found = cautions_of(make_config(**{**grown, **shape}), **base)
    assert len(found) == (1 if warned else 0)
    assert all(part in text for text in found for part in warned)


def test_the_base_itself_draws_no_warning(make_config: MakeConfig) -> None:
    assert cautions_of(make_config()) == []


@pytest.mark.parametrize(
    ("block", "alpha", "depth", "warned"),
    [
        ("post_norm", 0.5, 12, True),
        ("sandwich_norm", 0.75, 12, True),
        ("post_norm", 1.0, 12, False),
        ("post_norm", 0.5, 3, False),
        ("pre_norm", 0.5, 12, False),
    ],
)
def test_branches_that_end_in_a_norm_want_complete_p(
    make_config: MakeConfig, block: str, alpha: float, depth: int, warned: bool
) -> None:
    model = make_config(block=block, num_hidden_layers=depth)
    found = cautions_of(model, rule="depth_alpha", depth_alpha=alpha)
    assert [("model.block = " + block in text) for text in found] == [True] * warned


@pytest.mark.parametrize(
    ("shape", "multiplier", "warned"),
    [
        ({"family": "fog"}, 1.0, True),
        ({"family": "outlier_protected"}, 1.0, True),
        ({"family": "shaped"}, 1.0, True),
        ({"family": "fog"}, 50.0, False),
        ({"family": "outlier_protected", "initializer_range": 0.1}, 5.0, False),
        ({"family": "olmo2"}, 1.0, False),  # its first branch gives the stream a unit size
        ({"family": "sas"}, 1.0, False),
        ({"block": "sandwich_norm"}, 1.0, False),
        ({}, 1.0, False),
    ],
)
def test_blocks_without_a_norm_before_branches_want_a_stream_of_unit_size(
    make_config: MakeConfig, shape: dict[str, Any], multiplier: float, warned: bool
) -> None:
    found = cautions_of(make_config(**shape), embedding_multiplier=multiplier)
    assert [("set parameterization.embedding_multiplier=50" in text) for text in found] == [True] * warned


@pytest.mark.parametrize(
    ("factors", "multiplier", "warned"),
    [
        ({"embedding": 50.0}, 1.0, False),
        ({"hidden_matrix": 50.0}, 1.0, True),
        ({r".*embed_tokens\.weight": 0.02}, 50.0, True),
        ({"embedding": 0.0}, 1.0, False),  # no multiplier helps
    ],
)
def test_the_users_own_factor_on_the_embedding_counts_in_the_size_of_the_stream(
    make_config: MakeConfig, factors: dict[str, float], multiplier: float, warned: bool
) -> None:
    model = make_config(family="outlier_protected")
    found = cautions_of(model, embedding_multiplier=multiplier, init_multipliers=factors)
    advice = 50.0 * multiplier
    assert [(f"set parameterization.embedding_multiplier={advice:g}" in text) for text in found] == [True] * warned
