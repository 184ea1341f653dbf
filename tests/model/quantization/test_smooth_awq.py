"""Input scales: exact without rounding, chosen as the papers say, and folded into the norms before them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.layers import QuantizedLinear
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.awq import ALPHAS, awq_grid, awq_scale
from plumbline.model.quantization.post_training.calibration import decoder_blocks
from plumbline.model.quantization.post_training.gptq import gptq
from plumbline.model.quantization.post_training.recipes import Recipe, named_recipe
from plumbline.model.quantization.post_training.smooth import foldable, kept_input_scales, smooth_scale
from plumbline.model.quantization.quantizer import Quantizer
from tests.model.conftest import stock_model

MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]
SMOOTH = Recipe(name="smooth", smooth=0.5)
AFTER_OTHERS = ("self_attn.o_proj", "mlp.down_proj", "attn.c_proj", "mlp.c_proj")


def outlier_inputs() -> tuple[Tensor, Tensor]:
    """Return a weight [16, 32] and inputs [300, 32], a few of which are much larger than the others; fp32."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 32, generator=generator)
    inputs[:, ::8] *= 20.0
    return torch.randn(16, 32, generator=generator), inputs


@torch.no_grad()
def fold_input_scales(model: CausalLM) -> list[str]:
    """Divide gains by the input scales that they can take, and return the names of the layers that keep theirs."""
    place, blocks = decoder_blocks(model)
    left = []
    for number, block in enumerate(blocks):
        left += [f"{place}.{number}.{name}" for name in kept_input_scales(block)]
        for norm, layers, scale in foldable(block):
            for part in norm.parameters():
                part.div_(scale)
            for layer in layers:
                layer.input_scale = None
    return left


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_heads": 2},
        {"family": "outlier_protected"},
        {"family": "olmo2"},
        {"family": "gpt2"},
        {"model_type": "llama"},
        {"model_type": "gpt2"},
    ],
    ids=str,
)
def test_input_scales_change_nothing_without_rounding(
    make_model: MakeModel, enliven: Enliven, calibration_text: list[Tensor], shape: dict[str, Any]
) -> None:
    model: Any = stock_model(shape, enliven) if "model_type" in shape else make_model(**shape)
    expected = logits_of(model, calibration_text[0])
    quantize_model(model, SMOOTH, calibration_text)
    scaled = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert scaled
    for layer in scaled:
        assert layer.input_scale is not None
        assert not torch.allclose(layer.input_scale, torch.ones(()), atol=0.1)
    torch.testing.assert_close(logits_of(model, calibration_text[0]), expected, rtol=1e-4, atol=1e-4)


def test_smoothquant_evens_out_inputs_and_weights() -> None:
    weight, inputs = outlier_inputs()
    other = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    inputs[:, 3] = 0.0
    largest = inputs.abs().amax(0)
    columns = torch.cat((weight, other)).abs().amax(0)
    for alpha in (0.0, 0.5, 0.8, 1.0):
        scale = smooth_scale([weight, other], largest, alpha)
        expected = largest**alpha / columns ** (1 - alpha)
        expected[3] = 1.0  # nothing is known of it
        torch.testing.assert_close(scale, expected)
    even = smooth_scale([weight, other], largest, 0.5)
    used = largest > 0
    torch.testing.assert_close((largest / even)[used], (columns * even)[used])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_scaled_weights_are_rounded_for_scaled_inputs(
    make_model: MakeModel, calibration_text: list[Tensor], method: Any
) -> None:
    plain = make_model(num_hidden_layers=1)
    with torch.no_grad():
        plain.get_parameter("model.layers.0.input_layernorm.weight")[::11] *= 10.0
    model, quantizer = copy.deepcopy(plain), Quantizer(format="int3", granularity="group", group_size=8)
    smooth = 0.5 if method == "gptq" else None
    quantize_model(model, Recipe(name="both", method=method, weights=quantizer, smooth=smooth), calibration_text)
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        rows = torch.cat([plain.model.layers[0].attention_input(plain.model.embed(x, x)) for x in calibration_text])  # type: ignore[operator]
    rows = rows.flatten(0, 1) / layer.input_scale
    weight = plain.get_parameter("model.layers.0.self_attn.q_proj.weight").detach() * layer.input_scale
    if method == "gptq":
        expected, _ = gptq(weight, (rows.T @ rows).double(), quantizer)
    else:
        grid = awq_grid(weight, quantizer, rows.T @ rows)
        expected = grid.round(weight.unflatten(1, (-1, 8))).flatten(1)
    assert float(torch.isclose(layer.weight, expected, rtol=1e-3, atol=1e-6).float().mean()) > 0.99


def test_smoothing_helps_inputs_with_outlier_channels(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    plain = make_model()
    with torch.no_grad():
        for name, gain in plain.named_parameters():
            if name.endswith("layernorm.weight"):
                gain[::11] *= 30.0
    expected = logits_of(plain, calibration_text[0])
    missed = []
    for name in ("w8a8-dynamic", "w8a8-dynamic-smooth0.5"):
        model = copy.deepcopy(plain)
        quantize_model(model, named_recipe(name), calibration_text)
        missed.append((logits_of(model, calibration_text[0]) - expected).norm())
    assert missed[1] < 0.7 * missed[0]


@pytest.mark.parametrize(
    "quantizer",
    [Quantizer(format="int3", granularity="group", group_size=8), Quantizer(format="int4", granularity="channel")],
    ids=lambda quantizer: quantizer.granularity,
)
def test_awqs_alpha_is_the_one_of_least_output_error(quantizer: Quantizer) -> None:
    weight, inputs = outlier_inputs()
    other = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    sizes = inputs.abs().mean(0)

    def missed(scale: Tensor) -> float:
        rounded = (quantizer.fake_quantize(each * scale, "weights") / scale for each in (weight, other))
        return sum(
            float((inputs @ (new - old).T).square().sum()) for new, old in zip(rounded, (weight, other), strict=True)
        )

    candidates = [sizes**alpha for alpha in ALPHAS]
    assert (len(ALPHAS), ALPHAS[0]) == (20, 0.0)
    best = min(candidates, key=missed)
    found = awq_scale([weight, other], quantizer, sizes, (inputs.T @ inputs).double())
    assert found is not None
    torch.testing.assert_close(found / found[0], best / best[0])
    assert float(found.max() * found.min()) == pytest.approx(1.0, rel=1e-4)
    assert missed(found) < 0.8 * missed(torch.ones(32))


def test_awq_leaves_inputs_alone_that_are_all_alike() -> None:
    weight, _ = outlier_inputs()
    assert awq_scale([weight], Quantizer(format="int4", granularity="channel"), torch.ones(32), torch.eye(32)) is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["group", "channel", "tensor"])
def test_awqs_ranges_are_the_best_for_the_output_of_each_block(kind: Any, symmetric: bool) -> None:
    """By trying all: 11 shares of the range for each block, judged on its own part of the inputs."""
    weight, inputs = outlier_inputs()
    quantizer = Quantizer(
        format="int3", granularity=kind, group_size=8 if kind == "group" else None, symmetric=symmetric
    )
    view, _ = quantizer.blocked(weight, "weights")
    grid = awq_grid(weight, quantizer, inputs.T @ inputs)
    limits = quantizer.limits(weight, "weights")
    parts = inputs.unflatten(1, (-1, 8)) if kind == "group" else inputs

    def missed(shares: float | None) -> Tensor:
        tried = grid if shares is None else quantizer.grid_between(limits.shrunk(shares), limits.largest)
        off = tried.round(view) - view
        if kind == "group":
            return torch.einsum("ogi,tgi->tog", off, parts).square().sum(0)
        rows = (parts @ off.T).square().sum(0)
        return rows.sum() if kind == "tensor" else rows

    least = torch.stack([missed(1 - 0.05 * step) for step in range(11)]).amin(0)
    torch.testing.assert_close(missed(None), least, rtol=1e-3, atol=1e-3)
    assert float(missed(None).sum()) < float(missed(1.0).sum())


def test_awq_beats_rounding_to_nearest(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    plain = make_model()
    with torch.no_grad():
        for name, gain in plain.named_parameters():
            if name.endswith("layernorm.weight"):
                gain[::11] *= 10.0
    expected, missed = logits_of(plain, calibration_text[0]), []
    for method in ("rtn", "awq"):
        model = copy.deepcopy(plain)
        quantize_model(model, named_recipe(f"{method}-w3-g4"), calibration_text)
        missed.append((logits_of(model, calibration_text[0]) - expected).norm())
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear):
                assert layer.grid is not None
                view = layer.weight.unflatten(1, (-1, 4))
                torch.testing.assert_close(layer.grid.round(view), view)
    assert missed[1] < 0.8 * missed[0]


@pytest.mark.parametrize(
    ("shape", "folds"),
    [
        ({"num_key_value_heads": 2, "attention_gate": "head"}, True),
        ({"parallel": True, "norm": "layernorm", "norm_bias": True}, True),
        ({"value_residual": True}, True),
        ({"family": "gpt2"}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen3", "head_dim": 6}, True),
        ({"model_type": "gpt2"}, True),
        ({"norm": "single_scale_rmsnorm"}, False),
        ({"family": "olmo2"}, False),
        ({"block": "sandwich_norm"}, False),
        ({"family": "outlier_protected"}, False),
        ({"model_type": "gemma3_text", "head_dim": 6}, False),
        ({"model_type": "cohere"}, False),
        ({"model_type": "phi", "hidden_size": 32}, False),
    ],
    ids=str,
)
def test_scales_fold_into_norms_that_feed_nothing_else(
    make_model: MakeModel, enliven: Enliven, calibration_text: list[Tensor], shape: dict[str, Any], folds: bool
) -> None:
    model: Any = stock_model(shape, enliven) if "model_type" in shape else make_model(**shape)
    quantize_model(model, SMOOTH, calibration_text)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    expected = logits_of(model, calibration_text[0])
    left = fold_input_scales(model)
    assert sorted(left) == sorted(name for name in layers if not folds or name.endswith(AFTER_OTHERS))
    assert all((layer.input_scale is not None) == (name in left) for name, layer in layers.items())
    torch.testing.assert_close(logits_of(model, calibration_text[0]), expected, rtol=1e-4, atol=1e-4)


def test_a_skipless_block_reads_its_norm_twice(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    """Its values are the normed stream itself, after the first block; the MLP's norm is of the MLP alone, but stays."""
    model = make_model(family="sas")
    quantize_model(model, SMOOTH, calibration_text)
    expected = logits_of(model, calibration_text[0])
    left = fold_input_scales(model)
    assert "model.layers.1.self_attn.q_proj" in left
    torch.testing.assert_close(logits_of(model, calibration_text[0]), expected, rtol=1e-4, atol=1e-4)
