"""Models whose linear layers and stored keys and values are rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.quantization.layers import QuantizedLinear, quantized_linears, replace_linears
from plumbline.model.quantization.precision import PrecisionConfig, apply_precision
from plumbline.model.quantization.quantizer import Limits, Quantizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.model.conftest import MakeModel

TOKENS = torch.arange(20).view(2, 10)
COARSE, FINE, EXACT = (Quantizer(format=name) for name in ("int3", "int8", "e8m10"))


def test_blocks_compute_with_quantized_weights_and_inputs(make_model: MakeModel) -> None:
    """Weights coarse, inputs fine; biases, norms and the head as they are."""
    model = make_model(family="gpt2")
    attention: Any = model.model.layers[0].self_attn
    x = torch.randn(2, 10, 32)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        before: Any = model(TOKENS)
        with quantized_linears(model.model.layers, COARSE, FINE):
            weight = COARSE.fake_quantize(attention.q_proj.weight, "weights")
            expected = F.linear(FINE.fake_quantize(x, "activations"), weight, attention.q_proj.bias)
            assert torch.equal(attention.q_proj(x), expected)
            rounded: Any = model(TOKENS)
        assert (rounded - before).abs().max() > 1e-3
        with quantized_linears(model.model.layers, EXACT, EXACT):
            torch.testing.assert_close(model(TOKENS), before, rtol=1e-2, atol=1e-2)
        assert torch.equal(model(TOKENS), before), "the model is itself again"
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())


def test_an_error_inside_leaves_the_model_itself() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="inside"), quantized_linears(linear, COARSE, COARSE):
        raise RuntimeError("inside")
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_compiled_blocks_are_quantized_too() -> None:
    def as_it_is(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        return graph.forward

    layers, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    layers.compile(backend=as_it_is)
    exact = layers(x)
    with quantized_linears(layers, COARSE, COARSE):
        rounded = layers(x)
    assert not torch.equal(rounded, exact)
    assert torch.equal(layers(x), exact)


def test_compiled_blocks_round_and_learn_alike(make_model: MakeModel) -> None:
    """In one graph: rounding does not cut it into pieces."""
    by_token = Quantizer(format="int6", granularity="token")
    precision = PrecisionConfig(weights=COARSE, activations=by_token, kv_cache=by_token)
    found = []
    for compiled in (False, True):
        model = make_model(num_hidden_layers=1, num_key_value_heads=2)
        apply_precision(model.model.layers, precision)
        if compiled:
            model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
        model(TOKENS, labels=TOKENS)[0].backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_precision_rounds_the_blocks_for_good_and_keeps_every_name(make_model: MakeModel) -> None:
    model = make_model(num_key_value_heads=2)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        with quantized_linears(model.model.layers, COARSE, FINE):
            expected: Any = model(TOKENS)
        apply_precision(model.model.layers, PrecisionConfig(weights=COARSE, activations=FINE))
        assert torch.equal(model(TOKENS), expected)
    assert [name for name, _ in model.named_parameters()] == names
    model(TOKENS, labels=TOKENS)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    rounded = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(rounded) == 7 * len(model.model.layers)
    assert all(name.startswith("model.layers.") for name in rounded)


def test_keys_and_values_are_rounded_when_they_are_stored(make_model: MakeModel) -> None:
    """By the token, so that a cache that grows holds what the whole sequence at once would."""
    model = make_model(num_key_value_heads=2)
    by_token = Quantizer(format="int3", granularity="token")
    with torch.no_grad():
        plain: Any = model(TOKENS)
        apply_precision(model.model.layers, PrecisionConfig(kv_cache=by_token))
        whole: Any = model(TOKENS)
        cache = model.new_cache(2, 10)
        pieces: list[Any] = [model(piece, cache=cache) for piece in TOKENS.split([4, 1, 5], dim=1)]
    assert (whole - plain).abs().max() > 1e-3
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
    stored: Any = cache[0]
    assert all(len(row.unique()) <= 7 for row in stored.keys.flatten(0, 2))
    assert all(len(row.unique()) <= 7 for row in stored.values.flatten(0, 2))


def test_static_limits_are_used_as_they_were_measured() -> None:
    linear, x = nn.Linear(8, 4), 5 * torch.randn(3, 8)
    limits = Limits(torch.tensor(-1.0), torch.tensor(1.0))
    expected = F.linear(FINE.fake_quantize(x, "activations", limits), linear.weight, linear.bias)
    assert torch.equal(QuantizedLinear(linear, None, FINE, limits)(x), expected)
    assert not torch.equal(QuantizedLinear(linear, None, FINE)(x), expected)


def test_every_linear_layer_is_offered_by_its_name() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    seen = []

    def note(name: str, linear: nn.Linear) -> nn.Module:
        seen.append(name)
        return linear

    replace_linears(layers, note)
    assert seen == ["0", "1.1"]


def test_granularities_that_a_tensor_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity = head: weights have tensor, channel, group"):
        QuantizedLinear(nn.Linear(2, 2), Quantizer(format="int4", granularity="head"), None)
    with pytest.raises(ValueError, match="granularity = head: activations have"):
        QuantizedLinear(nn.Linear(2, 2), None, Quantizer(format="int4", granularity="head"))
