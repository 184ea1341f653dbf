"""Tiny decoders in which every part matters.

`make_config` fills a small shape, `make_model` builds the decoder around it. Its weights are far from their initial
values and, by default, its parameterization is away from the base: no bias is zero, no gain and no multiplier is one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.decoder import CausalLM
from model.parameterization import ParameterizationConfig, multipliers

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}
# m_N = 4, m_L = 3, attention scale 1/2 of the usual one
SCALED: dict[str, Any] = {
    "rule": "completep",
    "base_hidden_size": 8,
    "base_num_hidden_layers": 1,
    "base_head_dim": 2,
    "embedding_multiplier": 1.7,
    "output_multiplier": 2.3,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small are faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    def make(**changes: Any) -> ModelConfig:
        return ModelConfig.model_validate({**SHAPE, **changes})

    return make


@pytest.fixture(scope="session")
def enliven() -> Enliven:
    """Draw all weights of a module: gains around 1, biases around 0, matrices that keep the variance."""

    @torch.no_grad()
    def draw(module: nn.Module, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                weight.copy_(noise / weight.size(1) ** 0.5)
            elif weight.ndim == 3:  # over positions: the past only
                weight.copy_(noise.tril() / weight.size(2) ** 0.5)
            else:
                weight.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))

    return draw


@pytest.fixture(scope="session")
def make_model(make_config: MakeConfig, enliven: Enliven) -> MakeModel:
    """Build a decoder in evaluation mode; keyword arguments are keys of the model's configuration."""

    def make(rule: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> CausalLM:
        config = make_config(**changes)
        model = CausalLM(config, multipliers(config, ParameterizationConfig.model_validate(rule or SCALED)))
        enliven(model, seed)
        return model.eval()

    return make
