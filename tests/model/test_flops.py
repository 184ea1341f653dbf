"""The FLOP count against the matrices of a real decoder and against a count written out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from model.config import ModelConfig
from model.decoder import CausalLM
from model.flops import matrix_parameters, training_flops_per_token

MakeModel = Callable[..., CausalLM]
MakeConfig = Callable[..., ModelConfig]


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "qwen3"},
        {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True},
        {"family": "llama", "attention_bias": True, "mlp_bias": True, "intermediate_size": 24},
        {"family": "gpt2"},
        {"family": "gpt2", "tie_word_embeddings": False, "num_key_value_heads": 1, "mlp": "geglu"},
    ],
)
def test_matrix_parameters_are_those_of_the_module(make_model: MakeModel, shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    matrices = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
    assert matrix_parameters(model.config) == sum(matrices) + model.lm_head.weight.numel()


def test_training_flops_by_hand(make_config: MakeConfig) -> None:
    config = make_config(
        hidden_size=10, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=7
    )
    block = 10 * 8 + 10 * 4 + 10 * 4 + 8 * 10 + 3 * 10 * 64  # q, k, v, o, gated MLP (26 rounded up to 64)
    matrices = 3 * block + 10 * 7
    scores = 3 * 2 * (2 * 2 * 4 * 100)  # layers x heads x (q k^T and p v) over 100 keys, forward
    assert training_flops_per_token(config, 100) == 6 * matrices + 3 * scores
