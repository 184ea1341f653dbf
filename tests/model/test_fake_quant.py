"""Fake quantization: the grid that it rounds to, and a model whose matrix products are on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.quantization.fake_quant import fake_quantize, quantized_linears

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.model.conftest import MakeModel


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_land_on_the_nearest_level(bits: int) -> None:
    x = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    levels = torch.arange(-(2 ** (bits - 1) - 1), 2 ** (bits - 1)) * float(x.abs().max()) / (2 ** (bits - 1) - 1)
    nearest = levels[(x[..., None] - levels).abs().argmin(-1)]
    torch.testing.assert_close(fake_quantize(x, bits), nearest)
    assert len(fake_quantize(x, bits).unique()) <= 2**bits - 1


def test_one_outlier_costs_all_others() -> None:
    x = torch.tensor([0.1, -0.3, 0.2, 100.0])
    assert fake_quantize(x, 8).tolist() == pytest.approx([0.0, 0.0, 0.0, 100.0])
    torch.testing.assert_close(fake_quantize(x[:3], 8), x[:3], rtol=0, atol=0.3 / 254)


def test_dtype_shape_and_zeros_survive() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert fake_quantize(x, 8).dtype == torch.bfloat16
    assert torch.equal(fake_quantize(torch.zeros(2, 3), 8), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="bits = 1"):
        fake_quantize(x, 1)


def test_blocks_compute_with_quantized_weights_and_inputs(make_model: MakeModel) -> None:
    """Weights coarse, inputs fine; biases, norms and the head as they are."""
    model = make_model(family="gpt2")
    tokens = torch.arange(20).view(2, 10)
    attention: Any = model.model.layers[0].self_attn
    x = torch.randn(2, 10, 32)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        before: Any = model(tokens)
        with quantized_linears(model.model.layers, weight_bits=3, input_bits=8):
            expected = F.linear(fake_quantize(x, 8), fake_quantize(attention.q_proj.weight, 3), attention.q_proj.bias)
            assert torch.equal(attention.q_proj(x), expected)
            rounded: Any = model(tokens)
        assert (rounded - before).abs().max() > 1e-3
        with quantized_linears(model.model.layers, weight_bits=24, input_bits=24):
            torch.testing.assert_close(model(tokens), before, rtol=1e-3, atol=1e-3)
        assert torch.equal(model(tokens), before), "the model is itself again"
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())


def test_an_error_inside_leaves_the_model_itself() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="inside"), quantized_linears(linear, 2, 2):
        raise RuntimeError("inside")
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_compiled_blocks_are_quantized_too() -> None:
    def as_it_is(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        return graph.forward

    layers, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    layers.compile(backend=as_it_is)
    exact = layers(x)
    with quantized_linears(layers, 2, 2):
        rounded = layers(x)
    assert not torch.equal(rounded, exact)
    assert torch.equal(layers(x), exact)
