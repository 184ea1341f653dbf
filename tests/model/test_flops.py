"""The FLOP count against what torch counts of a real decoder and against a count written out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from plumbline.model.build import build_decoder
from plumbline.model.config import ModelConfig
from plumbline.model.flops import training_flops_per_token
from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.objectives.multi_token import MultiTokenConfig
from plumbline.model.objectives.next_token import NextTokenConfig

MakeConfig = Callable[..., ModelConfig]


def test_training_flops_by_hand(make_config: MakeConfig) -> None:
    config = make_config(
        hidden_size=10, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=7
    )
    block = 10 * 8 + 10 * 4 + 10 * 4 + 8 * 10 + 3 * 10 * 64  # q, k, v, o, gated MLP (26 rounded up to 64)
    matrices = 3 * block + 10 * 7
    scores = 3 * 2 * (2 * 2 * 4 * 100)  # layers x heads x (q k^T and p v) over 100 keys, forward
    assert training_flops_per_token(config, 100, NextTokenConfig()) == 6 * matrices + 3 * scores
    for window, keys in ((25, 25), (400, 100)):
        windowed = config.model_copy(update={"sliding_window": window})
        assert training_flops_per_token(windowed, 100, NextTokenConfig()) == 6 * matrices + 3 * scores * keys / 100


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "qwen3"},
        {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True},
        {"family": "llama", "attention_bias": True, "mlp_bias": True, "intermediate_size": 24},
        {"family": "gpt2"},
        {"family": "gpt2", "tie_word_embeddings": False, "num_key_value_heads": 1, "mlp": "geglu"},
        {"frozen_mlp": True},
        {"frozen_qk": True},
        {"frozen_qk": True, "num_key_value_heads": 2},
        {"family": "mixit"},
        {"family": "mixit", "frozen_mlp": False},
    ],
    ids=str,
)
def test_training_flops_are_those_that_torch_counts(make_config: MakeConfig, shape: dict[str, Any]) -> None:
    """Of the blocks; it sees nothing of the CPU's fused kernel, or since torch 2.15 also what that computes twice."""
    config, length = make_config(**shape), 24
    model = build_decoder(config, device="cpu")
    with FlopCounterMode(display=False) as counter:
        model.model(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
    claimed = training_flops_per_token(config, length, NextTokenConfig()) - 6 * config.hidden_size * config.vocab_size
    channels = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    fused = 0 if config.attention == "mixing" else channels * length
    seen = 14 if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry else 0
    assert counter.get_total_flops() == (claimed + (seen - 12) * fused) * 2 * length


WAYS: dict[str, dict[str, Any]] = {
    "grow": {},
    "causal": {"within": "causal"},
    "three passes": {"growth": "fixed", "passes": 3},
    "committed": {"commit": "thoughts"},
}


@pytest.mark.parametrize(
    ("length", "anchors", "horizon", "way", "passes"),
    [
        (512, 32, 4, "grow", 1.625),
        (2048, 64, 4, "grow", 1.3125),
        (4096, 64, 16, "grow", 3.125),
        (2048, 64, 8, "causal", 1.25),
        (2048, 64, 4, "three passes", 1.375),
        (2048, 64, 4, "committed", 2.3125),
    ],
)
def test_thoughts_cost_what_passes_the_blocks(
    make_config: MakeConfig, length: int, anchors: int, horizon: int, way: str, passes: float
) -> None:
    config = make_config(vocab_size=5)
    objective = LatentLookaheadConfig(anchors=anchors, horizon=horizon, **WAYS[way])
    plain = training_flops_per_token(config, length, NextTokenConfig())
    head = 6 * config.hidden_size * config.vocab_size
    predictions = 1 + anchors * horizon / length
    expected = (plain - head) * passes + head * predictions
    assert training_flops_per_token(config, length, objective) == pytest.approx(expected)


@pytest.mark.parametrize("projects", [False, True])
def test_further_heads_cost_a_block_and_a_prediction_each(make_config: MakeConfig, projects: bool) -> None:
    config, deeper = (make_config(num_hidden_layers=n, embedding_projection=projects) for n in (2, 4))
    head = 6 * config.hidden_size * (config.vocab_size + projects * config.hidden_size)
    expected = training_flops_per_token(deeper, 100, NextTokenConfig()) + 2 * head
    assert training_flops_per_token(config, 100, MultiTokenConfig(horizon=3)) == expected
