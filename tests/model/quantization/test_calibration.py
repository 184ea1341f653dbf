"""Calibration: every layer is rounded for the inputs that it has in the finished model, whatever the model."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.model.attention.softmax import SoftmaxAttention
from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.layers import QuantizedLinear
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.calibration import CalibrationText, decoder_blocks, unfold_conv1d
from plumbline.model.quantization.post_training.gptq import gptq
from plumbline.model.quantization.post_training.recipes import Recipe, named_recipe, recipes
from plumbline.model.quantization.precision import PrecisionConfig, StoredRounded, apply_precision
from plumbline.model.quantization.quantizer import Quantizer
from tests.model.conftest import stock_model

MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]
STATIC: dict[str, Any] = {"name": "static", "static": True}


def inputs_of(model: nn.Module, text: list[Tensor]) -> dict[str, list[Tensor]]:
    """Return what each linear layer of the blocks is given, by name; one tensor for each sample."""
    place, blocks = decoder_blocks(model)
    seen: dict[str, dict[int, Tensor]] = {}
    number = 0

    def see(name: str, _: nn.Module, arguments: tuple[Tensor]) -> None:
        seen.setdefault(name, {})[number] = arguments[0]

    handles = [
        module.register_forward_pre_hook(partial(see, name))
        for name, module in blocks.named_modules(prefix=place)
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        for number, sample in enumerate(text):  # noqa: B007 - for the hooks
            model(sample)
    for handle in handles:
        handle.remove()
    return {name: list(inputs.values()) for name, inputs in seen.items()}


def products_of(inputs: list[Tensor]) -> Tensor:
    """Return the sum of x x^T, fp64."""
    rows = [x.flatten(0, -2) for x in inputs]
    return torch.stack([(each.T @ each).double() for each in rows]).sum(0)


OURS: list[dict[str, Any]] = [
    {"num_key_value_heads": 2, "value_residual": True},
    {"family": "gpt2"},
    {"family": "outlier_protected", "attention_gate": "head"},
    {"family": "sas"},
    {"attention": "pruned", "parallel": True},
]
OPT = {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}
"""Its MLP gets all tokens of a sample as rows."""
STOCK: list[dict[str, Any]] = [
    {"model_type": "llama"},
    OPT,
    {"model_type": "gpt2"},
    {
        "model_type": "gemma3_text",
        "head_dim": 6,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
]


@pytest.mark.parametrize("shape", [*OURS, *STOCK], ids=str)
def test_every_layer_is_rounded_for_its_inputs_in_the_finished_model(
    make_model: MakeModel, enliven: Enliven, calibration_text: list[Tensor], shape: dict[str, Any]
) -> None:
    """So none is calibrated on the plain model, none out of its turn, and none with another block's arguments."""
    plain: Any = stock_model(shape, enliven) if "model_type" in shape else make_model(num_hidden_layers=2, **shape)
    recipe, model = named_recipe("gptq-w3"), copy.deepcopy(plain)
    reports = quantize_model(model, recipe, calibration_text)
    unfold_conv1d(plain)
    assert recipe.weights is not None
    finished, before = inputs_of(model, calibration_text), inputs_of(plain, calibration_text)
    assert {report.name for report in reports} == finished.keys()
    moved = 0
    for name, inputs in finished.items():
        weight, found = plain.get_submodule(name).weight, model.get_submodule(name).weight
        expected, elsewhere = (gptq(weight, products_of(each), recipe.weights)[0] for each in (inputs, before[name]))
        assert torch.equal(found, expected), name
        moved += not torch.equal(found, elsewhere)
    assert moved > len(finished) / 2


def test_layers_that_share_an_input_are_one_group_in_the_order_of_the_forward(
    make_model: MakeModel, enliven: Enliven, calibration_text: list[Tensor]
) -> None:
    attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    mlp, o_proj, down_proj = ["mlp.gate_proj", "mlp.up_proj"], ["self_attn.o_proj"], ["mlp.down_proj"]
    gpt2 = stock_model({"model_type": "gpt2"}, enliven)
    unfold_conv1d(gpt2)
    cases: list[tuple[Any, list[list[str]]]] = [
        (make_model(), [attention, o_proj, mlp, down_proj]),
        (stock_model({"model_type": "llama"}, enliven), [attention, o_proj, mlp, down_proj]),
        (make_model(parallel=True), [[*attention, *mlp], o_proj, down_proj]),
        (gpt2, [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]]),
    ]
    for model, expected in cases:
        with torch.no_grad():
            text = CalibrationText(model, calibration_text)
            text.run_block()
            text.advance()
            found = [sorted(group) for group in text.groups()]
        assert found == [sorted(group) for group in expected]


def test_conv1d_becomes_a_linear_layer_that_computes_the_same(enliven: Enliven, calibration_text: list[Tensor]) -> None:
    model = stock_model({"model_type": "gpt2"}, enliven)
    names, expected = dict(model.named_parameters()).keys(), model(calibration_text[0]).logits
    unfold_conv1d(model)
    assert isinstance(model.transformer.h[1].mlp.c_fc, nn.Linear)
    torch.testing.assert_close(model(calibration_text[0]).logits, expected)
    assert dict(model.named_parameters()).keys() == names


@pytest.mark.parametrize("smooth", [None, 0.5])
def test_static_limits_are_extremes_over_the_text_or_a_running_mean_of_percentiles(
    make_model: MakeModel, calibration_text: list[Tensor], smooth: float | None
) -> None:
    quantizer = Quantizer(format="int8", symmetric=False)
    percentile = Quantizer(format="int8", range="percentile", percentile=90.0)
    model = make_model(num_hidden_layers=2)
    recipe = Recipe(**STATIC, activations=quantizer, inputs={"down_proj": percentile}, smooth=smooth)
    quantize_model(model, recipe, calibration_text)
    inputs = inputs_of(model, calibration_text)
    for name, seen in inputs.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        assert (layer.input_scale is not None) == (smooth is not None)
        scale = 1.0 if layer.input_scale is None else layer.input_scale
        assert layer.limits is not None
        if name.endswith("down_proj"):
            sizes = [(sequence / scale).abs().flatten() for x in seen for sequence in x]
            reach, *others = (float(each.quantile(0.9, interpolation="nearest")) for each in sizes)
            for other in others:
                reach = 0.9 * reach + 0.1 * other
            assert float(layer.limits.high) == pytest.approx(reach, rel=1e-2)
            assert reach < 0.8 * max(float(each.max()) for each in sizes)
        else:
            assert float(layer.limits.low) == pytest.approx(min(float((x / scale).min()) for x in seen))
            assert float(layer.limits.high) == pytest.approx(max(float((x / scale).max()) for x in seen))


@pytest.mark.parametrize("covers", [{}, {"range": "percentile", "percentile": 99.0}], ids=["absmax", "percentile"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_static_limits_do_not_depend_on_how_the_text_is_cut(
    make_model: MakeModel, covers: dict[str, Any], granularity: Any
) -> None:
    """A short last sample must not undo the clipping."""
    tokens = torch.randint(53, (9, 24), generator=torch.Generator().manual_seed(5))
    quantizer = Quantizer(format="int8", granularity=granularity, **covers)
    recipe = Recipe(**STATIC, activations=quantizer)
    by_cut = []
    for sizes in ([8, 1], [3, 3, 3]):
        model = make_model(num_hidden_layers=2)
        quantize_model(model, recipe, list(tokens.split(sizes)))
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        by_cut.append([limits.high for layer in layers if (limits := layer.limits) is not None])
    assert by_cut[0]
    for one, other in zip(*by_cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0.0)


@torch.no_grad()
def test_reports_measure_the_finished_layers(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    plain = make_model(num_hidden_layers=2)
    model = copy.deepcopy(plain)
    reports = quantize_model(model, named_recipe("w8a8-token-smooth0.5"), calibration_text)
    inputs = inputs_of(model, calibration_text)
    for report in reports:
        layer, original = model.get_submodule(report.name), plain.get_submodule(report.name)
        assert isinstance(layer, QuantizedLinear)
        assert isinstance(original, nn.Linear)
        assert layer.input_scale is not None
        x = torch.cat(inputs[report.name])
        expected, found = original(x), layer(x)
        noise = (found - expected).double().square().sum() / expected.double().square().sum()
        assert report.output_sqnr == pytest.approx(-10 * math.log10(noise), abs=0.01)
        x = x / layer.input_scale
        assert report.input_absmax == pytest.approx(float(x.abs().max()))
        rms = x.square().mean((0, 1)).sqrt()
        assert report.input_kurtosis_channels == pytest.approx(float((rms**4).mean() / (rms**2).mean() ** 2))
        centred = (x - x.mean((1, 2), keepdim=True)).flatten(1)
        kurtosis = (centred**4).mean(1) / (centred**2).mean(1) ** 2
        assert report.input_kurtosis_sequences == pytest.approx(float(kurtosis.mean()), rel=1e-4)
        ratio = x.abs().amax(-1) / x.abs().median(-1).values
        assert report.input_mmr == pytest.approx(float(ratio.mean()), rel=1e-4)
        kept = 32 / layer.out_features if report.name.endswith(("o_proj", "down_proj")) else 0.0  # no norm takes it
        assert report.shape == tuple(layer.weight.shape)
        assert report.stored_bits == pytest.approx(8 + 16 / layer.in_features + kept)
        effective = layer.weight / layer.input_scale
        missed = (effective - original.weight).norm() / original.weight.norm()
        assert report.weight_error == pytest.approx(float(missed), rel=1e-4)


@pytest.mark.parametrize("covers", [{}, {"range": "percentile", "percentile": 90.0}], ids=["absmax", "percentile"])
def test_tokens_that_a_block_runs_as_rows_are_measured_by_sequence(enliven: Enliven, covers: dict[str, Any]) -> None:
    tokens = torch.randint(53, (4, 24), generator=torch.Generator().manual_seed(5))
    quantizer = Quantizer(format="int8", **covers)
    measured = []
    for size in (4, 1):
        model = stock_model(OPT, enliven)
        reports = quantize_model(model, Recipe(**STATIC, activations=quantizer), list(tokens.split(size)))
        (report,) = (each for each in reports if each.name.endswith("0.fc1"))
        layer = model.get_submodule(report.name)
        measured.append((float(layer.limits.high), report.input_kurtosis_channels, report.input_kurtosis_sequences))
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)
    (x,) = inputs_of(model, [tokens])["model.decoder.layers.0.fc1"]
    squares = x.square().mean(0)
    assert measured[0][1] == pytest.approx(float(squares.square().mean() / squares.mean().square()), rel=1e-4)


def test_without_text_only_weights_are_reported(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    model, with_text = make_model(), make_model()
    report = quantize_model(model, named_recipe("rtn-w4"))[0]
    assert (report.output_sqnr, report.input_mmr, report.input_absmax) == (None, None, None)
    assert 0.05 < report.weight_error < 0.2
    assert quantize_model(with_text, named_recipe("rtn-w4"), calibration_text)[0].output_sqnr is not None
    weights = zip(model.parameters(), with_text.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_model_that_rounds_while_it_trains_keeps_what_the_recipe_leaves_out(
    make_model: MakeModel, calibration_text: list[Tensor]
) -> None:
    tokens = calibration_text[0]
    coarse = PrecisionConfig.model_validate({"weights": 4, "activations": 4, "kv_cache": 4})
    trained = make_model()
    apply_precision(trained.model.layers, coarse)
    with torch.no_grad():
        expected: Any = trained(tokens)
        same = copy.deepcopy(trained)
        quantize_model(same, Recipe(name="as trained", weights=coarse.weights), calibration_text)
        torch.testing.assert_close(same(tokens), expected)
        inputs_only = copy.deepcopy(trained)
        quantize_model(inputs_only, Recipe(name="inputs", activations=coarse.activations), calibration_text)
        torch.testing.assert_close(inputs_only(tokens), expected)
        finer = copy.deepcopy(trained)
        cache = Quantizer(format="int8", granularity="token")
        quantize_model(finer, Recipe(name="values", values=cache), calibration_text)
        assert (finer(tokens) - expected).abs().max() > 1e-3
        for module in finer.modules():
            if isinstance(module, SoftmaxAttention):
                assert isinstance(module.as_stored, StoredRounded)
                assert (module.as_stored.keys, module.as_stored.values) == (coarse.kv_cache, cache)
                module.as_stored.values = coarse.kv_cache
        torch.testing.assert_close(finer(tokens), expected)


def test_what_cannot_be_done_is_refused_before_anything_changes(
    make_model: MakeModel, calibration_text: list[Tensor]
) -> None:
    model = make_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for name in ("gptq-w4", "awq-w4", "w8a8-static", "w8a8-token-smooth0.5"):
        with pytest.raises(ValueError, match=f"recipe {name} needs calibration text"):
            quantize_model(model, named_recipe(name))
    with pytest.raises(
        ValueError, match=r"group_size = 64 does not divide the 32 inputs of model.layers.0.self_attn.q"
    ):
        quantize_model(model, named_recipe("rtn-w4-g64"))
    groups = Quantizer(format="int8", granularity="group", group_size=36)
    odd = Recipe(name="odd", activations=Quantizer(format="int8"), inputs={"down_proj": groups})
    with pytest.raises(
        ValueError, match=r"group_size = 36 does not divide the .* inputs of model.layers.0.mlp.down_proj"
    ):
        quantize_model(model, odd)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    quantize_model(model, named_recipe("rtn-w4"))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj is rounded already"):
        quantize_model(model, named_recipe("rtn-w4"))
    with pytest.raises(ValueError, match=r"Sequential: its blocks are in none of model\.layers"):
        quantize_model(nn.Sequential(), named_recipe("rtn-w4"))
    idle = make_model()
    idle.model.layers[1].mlp.spare = nn.Linear(32, 32)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"block 1: mlp.spare does not run"):
        quantize_model(idle, named_recipe("rtn-w4"), calibration_text)


def test_every_named_recipe_runs(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    """Each on a copy of one model; more bits are closer."""
    plain, tokens = (
        make_model(num_hidden_layers=1, hidden_size=128, head_dim=32, intermediate_size=128),
        calibration_text[0],
    )
    missed = {}
    with torch.no_grad():
        expected: Any = plain(tokens)
        for recipe in recipes(["all"]):
            model = copy.deepcopy(plain)
            quantize_model(model, recipe, calibration_text[2:])
            logits: Any = model(tokens)
            missed[recipe.name] = float((logits - expected).norm() / expected.norm())
    assert all(0 < error < 1.5 for error in missed.values())
    for kind in ("rtn-w{}", "kv{}", "kv{}-head", "kv{}-channel"):
        errors = [missed[kind.format(bits)] for bits in (2, 4, 8)]
        assert errors == sorted(errors, reverse=True)
    assert missed["w4a4-down8"] < missed["w4a4-token"]
    assert missed["w8a8-token"] < missed["w4a8-token"]
    assert missed["nvfp4-w"] < missed["nvfp4"]
