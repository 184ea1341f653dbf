"""Scaled rotary positions against transformers' own functions, and what is refused."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plumbline.model.config import ModelConfig
from plumbline.model.rotary import rotary_frequencies, rotary_tables
from plumbline.model.rotary_scaling import RULES, scaling_of
from tests.model.conftest import SCALINGS, SHAPE


def theirs(head_dim: int, rope_parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Return frequencies and magnitude by transformers, whose warnings of odd lengths do not matter here."""
    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=2**17, rope_parameters=dict(rope_parameters))
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, magnitude


def ours(head_dim: int, rope_parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Return the same by this decoder, with the section that it makes of the stock configuration."""
    section = scaling_of(rope_parameters)
    assert section is not None
    rule = RULES[rope_parameters["rope_type"]].model_validate(section)
    return rotary_frequencies(head_dim, rope_parameters["rope_theta"], rule)


def compare(head_dim: int, rope_parameters: dict[str, Any]) -> None:
    (found, magnitude), (expected, factor) = ours(head_dim, rope_parameters), theirs(head_dim, rope_parameters)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
    assert magnitude == pytest.approx(factor, rel=1e-12)


LLAMA_3_2 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "rope_parameters", [*SCALINGS.values(), LLAMA_3_2, QWEN3_YARN], ids=lambda rope: rope["rope_type"]
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_frequencies_are_those_of_transformers(head_dim: int, rope_parameters: dict[str, Any]) -> None:
    compare(head_dim, rope_parameters)


@given(
    head_dim=st.integers(4, 64).map(lambda half: 2 * half),
    theta=st.floats(100.0, 1e6),
    factor=st.floats(1.0, 64.0),
    original=st.integers(16, 2**16),
    low=st.floats(0.25, 4.0),
    width=st.floats(1.5, 32.0),  # near 1 the ramp divides by the difference of two rounded numbers
    truncate=st.booleans(),
)
def test_any_frequencies_are_those_of_transformers(
    head_dim: int, theta: float, factor: float, original: int, low: float, width: float, truncate: bool
) -> None:
    common = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    compare(head_dim, {"rope_type": "llama3", **common, "low_freq_factor": low, "high_freq_factor": low * width})
    yarn = {"rope_type": "yarn", **common, "beta_slow": low, "beta_fast": low * width, "truncate": truncate}
    compare(head_dim, yarn)


def test_tables_turn_by_the_scaled_frequencies_and_grow_by_the_magnitude() -> None:
    rule = RULES["yarn"].model_validate(scaling_of(SCALINGS["yarn"]))
    cos, sin = rotary_tables(torch.arange(40)[None], 8, 300.0, rule)
    frequencies, magnitude = rotary_frequencies(8, 300.0, rule)
    turned = torch.complex(cos[0, 0, :, :4], sin[0, 0, :, 4:])
    angles = torch.arange(40)[:, None] * frequencies
    torch.testing.assert_close(turned, magnitude * torch.polar(torch.ones(()), angles))
    assert magnitude > 1.1


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear", "factor": 0.5}, "greater than or equal to 1"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        ({**LLAMA_3_2, "rope_theta": 1.0}, "rope_theta"),
        (
            {key: value for key, value in {**LLAMA_3_2, "high_freq_factor": 1.0}.items() if key != "rope_theta"},
            "high_freq_factor = 1.0 must be above low_freq_factor = 1.0",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 0.5},
            "beta_fast = 0.5 must not be below beta_slow = 1.0",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 0.0},
            "attention_factor\n.* greater than 0",
        ),
    ],
)
def test_a_scaling_that_is_none_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({**SHAPE, "rope_scaling": scaling})


def test_learned_positions_are_not_stretched() -> None:
    with pytest.raises(ValueError, match="rope_scaling needs position_embedding: rope"):
        ModelConfig.model_validate({**SHAPE, "family": "gpt2", "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
