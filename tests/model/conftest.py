"""Tiny decoders in which every part matters.

`make_config` fills a small shape, `make_model` builds the decoder around it. Its weights are far from their initial
values and, by default, its parameterization is away from the base: no bias is zero, no gain and no multiplier is one.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.model.combinations import check_model
from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.table import parameter_table
from plumbline.model.sampling import Sampling

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]
Counting = Callable[[str], TrainedLM]

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}
STOCK_SHAPE: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 300.0,
        "factor": 4.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 12,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "beta_fast": 1.5,
        "beta_slow": 0.2,
    },
}
"""Values of rope_parameters under which a head of 8 or wider has pairs of every kind: kept, divided and between."""
# m_N = 4, m_L = 3, attention scale 1/2 of the usual one
SCALED: dict[str, Any] = {
    "rule": "completep",
    "base_hidden_size": 8,
    "base_num_hidden_layers": 1,
    "base_head_dim": 2,
    "embedding_multiplier": 1.7,
    "output_multiplier": 2.3,
}


def scaled(rule: str) -> dict[str, Any]:
    """Return switches of rotary positions that are stretched by a rule."""
    scaling = dict(SCALINGS[rule])
    return {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    def make(**changes: Any) -> ModelConfig:
        return check_model(ModelConfig.model_validate({**SHAPE, **changes}))

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
def calibration_text() -> list[Tensor]:
    """Return three pairs of random sequences, [2, 24] token ids each."""
    return list(torch.randint(53, (3, 2, 24), generator=torch.Generator().manual_seed(5)))


@pytest.fixture(scope="session")
def make_model(make_config: MakeConfig, enliven: Enliven) -> MakeModel:
    """Build a decoder in evaluation mode; keyword arguments are keys of the model's configuration."""

    def make(rule: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> CausalLM:
        config = make_config(**changes)
        model = CausalLM(config, multipliers(config, ParameterizationConfig.model_validate(rule or SCALED)))
        enliven(model, seed)
        return model.eval()

    return make


def loaded(model: CausalLM, folder: Path) -> LoadedModel:
    """Return what `load_model` would give for a run that trained this decoder."""
    values = {
        "run": {"name": "tiny"},
        "model": model.config.model_dump(),
        "parameterization": {"rule": "completep", "base_hidden_size": 8, "base_num_hidden_layers": 1},
        "data": {
            "train": [{"path": "corpus"}],
            "sequence_length": 16,
            "global_batch_size": 1,
            "micro_batch_size": 1,
        },
        "optimizer": {"lr": 0.01},
        "train": {"steps": 10},
    }
    config = parse(Config, values, source="test")
    return LoadedModel(model, folder / "checkpoints" / "step_00000010", None, config, 10, 160)


def continued(model: CausalLM, prompts: Tensor, tokens: int, seed: int = 0, **options: Any) -> Tensor:
    """Return the tokens [B, tokens] that follow prompts [B, T]; each row draws by a seed of its own, from `seed` on."""
    seeds = range(seed, seed + len(prompts))
    steps = loaded(model, Path()).continuations(prompts.tolist(), tokens, sampling=Sampling(**options), seeds=seeds)
    return torch.tensor(list(steps)).T


def stock_model(source: dict[str, Any], enliven: Enliven) -> Any:
    """Return a model of transformers by its own class; `source` has the entries of config.json beside the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to load, and few tests need it

    entries = copy.deepcopy({**STOCK_SHAPE, **source})
    # Gemma2's class of transformers 5.20 takes a kernel that leaves its cap out, if it is not told otherwise
    attention = "eager" if entries.get("attn_logit_softcapping") else None
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries), attn_implementation=attention).eval()
    enliven(model)
    return model


def packed_batch(documents: Tensor, ignored: int) -> dict[str, Tensor]:
    """Random tokens in packed documents [B, T]; the first `ignored` labels of the first row are left out."""
    rows, length = documents.shape
    tokens = torch.randint(SHAPE["vocab_size"], (rows, length + 1), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, :ignored] = -100
    begins = torch.stack([(row[:, None] == row).int().argmax(0) for row in documents])
    return {
        "input_ids": tokens[:, :-1],
        "labels": labels,
        "document_ids": documents,
        "positions": torch.arange(length) - begins,
        "sample_index": 3 + 5 * torch.arange(rows),
    }


def count_by_two(generator: torch.Generator) -> dict[str, Tensor]:
    """Return a batch of 16 sequences of 12 tokens, each two more than the one before, modulo 31."""
    tokens = (torch.randint(31, (16, 1), generator=generator) + 2 * torch.arange(13)) % 31
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "document_ids": torch.zeros(16, 12),
        "positions": torch.zeros(16, 12),
        "sample_index": torch.randint(2**40, (16,), generator=generator),
    }


@pytest.fixture(scope="session")
def counting(make_config: MakeConfig) -> Counting:
    """Return a model that has learned to count, with thoughts of three slots; keyword: how they grow."""

    @functools.cache
    def train(growth: str) -> TrainedLM:
        config, rule = make_config(num_hidden_layers=2, vocab_size=31), ParameterizationConfig(rule="sp")
        keys = {"horizon": 3, "anchors": 4, "weight": 1.0, "growth": growth}
        look, forward = LatentLookaheadConfig.model_validate(keys), multipliers(config, rule)
        model = TrainedLM(config, forward, look.make(config, forward, 0))
        initialize(model, parameter_table(config, rule, OptimizerSettings(1e-2, 0.0, 1e-8), look), seed=0)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        generator = torch.Generator().manual_seed(0)
        for step in range(150):
            batch = count_by_two(generator)
            losses = model.losses(batch, step)
            optimizer.zero_grad()
            (losses.terms / model.objective.targets(batch)).sum().backward()
            optimizer.step()
        return model.eval()

    return train
