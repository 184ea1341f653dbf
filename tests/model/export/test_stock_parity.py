"""Our families against the stock transformers classes they are named after: logits and gradients from equal weights.

The stock models run with eager attention, whose arithmetic shares nothing with our kernel.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.parameterization.multipliers import multipliers

Enliven = Callable[..., None]

SHAPE = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 40}
TOKENS = torch.randint(53, (3, 33), generator=torch.Generator().manual_seed(0))


def ours(**keys: Any) -> CausalLM:
    config = ModelConfig.model_validate({**SHAPE, **keys})
    return CausalLM(config, multipliers(config, ParameterizationConfig(rule="sp"))).eval()


def as_ours(stock: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return GPT2LMHeadModel's weights (or gradients) by our names: c_attn holds q, k and v; matrices transposed."""
    named = {
        "model.embed_tokens.weight": stock["transformer.wte.weight"],
        "model.embed_positions.weight": stock["transformer.wpe.weight"],
        "model.norm.weight": stock["transformer.ln_f.weight"],
        "model.norm.bias": stock["transformer.ln_f.bias"],
    }
    if "lm_head.weight" in stock:
        named["lm_head.weight"] = stock["lm_head.weight"]
    for i in range(layers):
        block = {name.removeprefix(f"transformer.h.{i}."): value for name, value in stock.items()}
        parts = zip("qkv", block["attn.c_attn.weight"].chunk(3, dim=1), block["attn.c_attn.bias"].chunk(3), strict=True)
        for letter, weight, bias in parts:
            named[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = weight.T
            named[f"model.layers.{i}.self_attn.{letter}_proj.bias"] = bias
        for theirs, module in (("attn.c_proj", "self_attn.o_proj"), ("mlp.c_fc", "mlp.up_proj")):
            named[f"model.layers.{i}.{module}.weight"] = block[f"{theirs}.weight"].T
            named[f"model.layers.{i}.{module}.bias"] = block[f"{theirs}.bias"]
        named[f"model.layers.{i}.mlp.down_proj.weight"] = block["mlp.c_proj.weight"].T
        named[f"model.layers.{i}.mlp.down_proj.bias"] = block["mlp.c_proj.bias"]
        for theirs, norm in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
            named[f"model.layers.{i}.{norm}.weight"] = block[f"{theirs}.weight"]
            named[f"model.layers.{i}.{norm}.bias"] = block[f"{theirs}.bias"]
    return named


def load(model: CausalLM, weights: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def compare(model: CausalLM, stock: PreTrainedModel, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    load(model, rename(dict(stock.named_parameters())))
    inputs, labels = TOKENS[:, :-1], TOKENS[:, 1:]
    expected = stock(input_ids=inputs).logits
    assert relative_error(model(inputs), expected) < 1e-5
    cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    (model(inputs, labels=labels)[0] / labels.numel()).backward()
    wanted = rename(gradients(stock))
    # The bias of the keys shifts all logits of a query alike, so its gradient is zero but for rounding
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in gradients(model).items():
        difference = (gradient - wanted[name]).abs()
        assert (difference <= 1e-6 * largest + 1e-3 * wanted[name].abs()).all(), f"{name}: {difference.max()}"


@pytest.mark.parametrize(
    ("theirs", "keys"),
    [
        ({"activation_function": "gelu_new", "n_head": 4}, {"num_attention_heads": 4}),
        ({"activation_function": "gelu", "n_head": 3}, {"num_attention_heads": 3, "mlp": "gelu"}),
        (
            {"n_head": 2, "n_inner": 20, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-2},
            {"num_attention_heads": 2, "intermediate_size": 20, "tie_word_embeddings": False, "norm_eps": 1e-2},
        ),
    ],
)
def test_gpt2(enliven: Enliven, theirs: dict[str, Any], keys: dict[str, Any]) -> None:
    shape = {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_positions": 40}
    stock = GPT2LMHeadModel(GPT2Config(**shape, **theirs, attn_implementation="eager")).eval()
    enliven(stock)
    compare(ours(family="gpt2", **keys), stock, lambda weights: as_ours(weights, 2))


LLAMA_LIKE: list[dict[str, Any]] = [
    {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6, "intermediate_size": 64},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 36},
    {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 36,
        "attention_bias": True,
    },
    {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    },
]


@pytest.mark.parametrize("shape", LLAMA_LIKE)
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_llama(enliven: Enliven, shape: dict[str, Any], mlp_bias: bool) -> None:
    keys = {**SHAPE, "tie_word_embeddings": False, **shape, "mlp_bias": mlp_bias}
    rope = {"rope_type": "default", "rope_theta": 300.0}
    config = LlamaConfig(**keys, rms_norm_eps=1e-3, rope_parameters=rope, attn_implementation="eager")
    stock = LlamaForCausalLM(config).eval()
    enliven(stock)
    compare(ours(family="llama", **keys, norm_eps=1e-3, rope_theta=300.0), stock, dict)


@pytest.mark.parametrize("shape", LLAMA_LIKE)
@pytest.mark.parametrize("window", [None, 2, 5])
def test_qwen3(enliven: Enliven, shape: dict[str, Any], window: int | None) -> None:
    keys = {**SHAPE, "tie_word_embeddings": False, **shape}
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    stock = Qwen3ForCausalLM(
        Qwen3Config(**keys, **sliding, rms_norm_eps=1e-3, rope_parameters=rope, attn_implementation="eager")
    ).eval()
    enliven(stock)
    compare(ours(family="qwen3", **keys, norm_eps=1e-3, sliding_window=window), stock, dict)
