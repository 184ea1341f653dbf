"""Whole models: ours and its stock export agree when quantized, caches round what they store, torchao rounds alike."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.export.hugging_face import export
from plumbline.launcher.runtime.export.verify import check_tokens
from plumbline.launcher.runtime.models.open import load_model
from plumbline.launcher.runtime.quantize import save
from plumbline.model.decoder import CausalLM
from plumbline.model.quantization.layers import QuantizedLinear, replace_linears
from plumbline.model.quantization.post_training.apply import quantize_model
from plumbline.model.quantization.post_training.recipes import Recipe, named_recipe
from plumbline.model.quantization.quantizer import Quantizer
from plumbline.model.stock_inputs import cache_argument
from tests.model.conftest import loaded, stock_model

MakeModel = Callable[..., CausalLM]
Enliven = Callable[..., None]
PLAIN_RULE = {"rule": "sp"}  # no multiplier, so that the export has the very same weights
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"num_key_value_heads": 2},
    "GPT2LMHeadModel": {"family": "gpt2"},
    "Gemma3ForCausalLM": {"block": "sandwich_norm", "sliding_window": 6},
    # A gain that folds into weights without another rounding of scales: a power of two
    "PlumblineForCausalLM": {"family": "outlier_protected", "num_key_value_heads": 2, "branch_gain_init": 0.25},
}
SHARED = ["rtn-w4", "gptq-w3", "awq-w4-g8", "w8a8-static", "w8a8-token-smooth0.5", "mxfp4", "kv3-token", "kv3-channel"]


@pytest.fixture(scope="module")
def exported(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[CausalLM, nn.Module]]:
    """Return our model, and what opens from its export, by the class."""
    pairs = {}
    for name, shape in SHAPES.items():
        folder = tmp_path_factory.mktemp(name)
        model = make_model(rule=PLAIN_RULE, num_hidden_layers=2, intermediate_size=64, **shape)
        assert export(loaded(model, folder), folder / "out", "auto").architecture == name
        pairs[name] = model, load_model(folder / "out", torch.device("cpu")).module
    return pairs


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("Qwen3ForCausalLM", name) for name in SHARED),
        *(each for each in product(SHAPES, ("gptq-w3", "w8a8-token-smooth0.5", "kv3-channel")) if each[0][0] != "Q"),
    ],
)
@torch.no_grad()
def test_our_model_and_its_stock_export_agree_when_quantized(
    exported: dict[str, tuple[CausalLM, nn.Module]], calibration_text: list[Tensor], architecture: str, name: str
) -> None:
    """Far more closely than either agrees with the plain model; a value between two grid points may go either way."""
    ours, stock = exported[architecture]
    tokens = calibration_text[0]
    expected: Any = ours(tokens)
    torch.testing.assert_close(stock(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
    ours, stock = copy.deepcopy(ours), copy.deepcopy(stock)
    for model in (ours, stock):
        quantize_model(model, named_recipe(name), calibration_text)
    found: Any = ours(tokens)
    theirs: Any = stock(input_ids=tokens).logits
    cost = (found - expected).norm()
    assert cost > 1e-3 * expected.norm()
    assert (theirs - found).norm() < 0.02 * cost
    if name.startswith(("rtn", "kv")):
        torch.testing.assert_close(theirs, found, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def assert_saved_as_measured(ours: CausalLM, name: str, text: list[Tensor], folder: Path) -> None:
    recipe = named_recipe(name)
    save.save_quantized(loaded(copy.deepcopy(ours), folder), recipe, text, folder / "saved")
    quantize_model(ours, recipe, text)
    tokens = check_tokens(ours.config)
    expected = ours(tokens)
    found = load_model(folder / "saved", torch.device("cpu")).module(tokens).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < (1e-4 if recipe.activations is None else 1e-2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gptq-w3", {"branch_gain": "vector"}),
        ("gptq-w3", {"block": "sandwich_norm", "sliding_window": 6, "tie_word_embeddings": True}),
        (
            "gptq-w3",
            {"parallel": True, "norm": "layernorm", "norm_bias": False, "qk_norm": "none"},
        ),  # Cohere
        ("rtn-w4-g8", {"attention_gate": "elementwise"}),  # Qwen3.5: queries and gates are one matrix
        ("rtn-w4-hadamard", {"norm": "single_scale_rmsnorm"}),
        ("w8a8-static-asym-p99.999-wtensor", {"branch_gain": "vector"}),  # a scale for a tensor, whose rows differ
    ],
    ids=["vector", "sandwich", "parallel", "gated", "rotated", "one scale"],
)
def test_a_saved_folder_is_what_the_recipe_makes_of_the_run_whatever_its_factors(
    make_model: MakeModel, calibration_text: list[Tensor], tmp_path: Path, name: str, shape: dict[str, Any]
) -> None:
    """Factors that are no powers of two would change the last bit of fp16 scales, and with it the codes."""
    pytest.importorskip("compressed_tensors")
    ours = make_model(num_hidden_layers=3, intermediate_size=64, **shape)
    assert ours.multipliers.residual not in (1.0, 0.5, 0.25)
    assert_saved_as_measured(ours, name, calibration_text, tmp_path)


@pytest.mark.parametrize("name", ["gptq-w4", "fp8-e4m3-row"])
def test_a_run_that_rounded_weights_in_training_is_saved_as_it_is_measured(
    make_model: MakeModel, calibration_text: list[Tensor], tmp_path: Path, name: str
) -> None:
    """The recipe gets its stored weights, which nothing has rounded."""
    pytest.importorskip("compressed_tensors")
    ours = make_model(num_hidden_layers=1)
    grid = Quantizer(format="int3", granularity="channel")
    replace_linears(ours.model.layers, lambda _, layer: QuantizedLinear(layer, grid, None))
    assert_saved_as_measured(ours, name, calibration_text, tmp_path)


@pytest.mark.parametrize("gains", [slice(None), slice(3)], ids=["all", "some rows"])
@torch.no_grad()
def test_a_branch_whose_gain_is_zero_stays_zero(make_model: MakeModel, tmp_path: Path, gains: slice) -> None:
    pytest.importorskip("compressed_tensors")
    ours = make_model(num_hidden_layers=1, intermediate_size=64, branch_gain="vector")
    ours.get_parameter("model.layers.0.attn_residual.gain")[gains] = 0.0
    save.save_quantized(loaded(ours, tmp_path), named_recipe("rtn-w4"), [], tmp_path / "saved")
    writer = load_model(tmp_path / "saved", torch.device("cpu")).module.get_submodule("model.layers.0.self_attn.o_proj")
    width = ours.get_parameter("model.layers.0.self_attn.o_proj.weight").size(1)
    written = writer(torch.eye(width))[:, gains]
    assert torch.equal(written, torch.zeros_like(written))


@pytest.mark.parametrize(
    "source", [{"model_type": "llama"}, {"model_type": "gpt2"}], ids=lambda each: each["model_type"]
)
@torch.no_grad()
def test_a_stock_model_attends_to_what_its_cache_would_store(
    enliven: Enliven, calibration_text: list[Tensor], source: dict[str, Any]
) -> None:
    """A cache of the caller's is left as it is; one that grows token by token holds the same."""
    model, tokens = stock_model(source, enliven), calibration_text[0]
    expected = model(tokens).logits
    by_token = Quantizer(format="int4", granularity="token")
    quantize_model(model, Recipe(name="keys", keys=by_token))
    whole = model(tokens)
    assert (whole.logits - expected).abs().max() > 1e-3
    name = cache_argument(model)
    layer = whole[name].layers[1]
    assert all(len(row.unique()) <= 15 for row in layer.keys.flatten(0, 2))
    assert layer.values.unique().numel() > 300  # the recipe rounds keys only
    cache, steps = None, []
    for piece in tokens.split([20, 1, 3], dim=1):
        out = model(piece, **{name: cache}) if cache else model(piece)
        cache = out[name]
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole.logits, rtol=1e-4, atol=1e-4)
    from transformers import DynamicCache

    own = DynamicCache(config=model.config)
    torch.testing.assert_close(model(tokens, **{name: own}).logits, expected)


@torch.no_grad()
def test_attention_over_rounded_keys_and_values_written_out(make_model: MakeModel) -> None:
    """One layer without positions or norms in between, by hand."""
    model = make_model(rule=PLAIN_RULE, num_hidden_layers=1, qk_norm="none", position_embedding="learned")
    keys, values = Quantizer(format="int3", granularity="head"), Quantizer(format="int4", granularity="channel")
    quantize_model(model, Recipe(name="cache", keys=keys, values=values))
    attention: Any = model.model.layers[0].self_attn
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    query, key, value = (
        layer(x).unflatten(-1, (4, 8)).transpose(1, 2)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    steps = key.abs().amax((0, 2, 3), keepdim=True) / 3
    key = (key / steps).round() * steps
    steps = value.abs().amax((0, 2), keepdim=True) / 7
    value = (value / steps).round() * steps
    logits = (query @ key.mT / 8**0.5).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf)
    expected = attention.o_proj((logits.softmax(-1) @ value).transpose(1, 2).flatten(2))
    from plumbline.model.attention.context import AttentionContext

    torch.testing.assert_close(attention(x, AttentionContext(None, None)), expected, rtol=1e-4, atol=1e-5)


def test_caches_that_cannot_be_rounded_are_refused(make_model: MakeModel) -> None:
    for shape in ({"attention": "pruned"}, {"family": "mixit"}):
        model = make_model(**shape)
        with pytest.raises(ValueError, match=r"recipe kv4: model\.attention = .*: its cache is not rounded"):
            quantize_model(model, named_recipe("kv4"))


def test_groups_that_do_not_divide_a_head_are_refused_before_anything_is_rounded(
    make_model: MakeModel, enliven: Enliven
) -> None:
    groups = Quantizer(format="int4", granularity="group", group_size=16)
    recipe = Recipe(name="wide", keys=groups, weights=Quantizer(format="int8", granularity="channel"))
    for model in (make_model(), stock_model({"model_type": "llama"}, enliven)):
        with pytest.raises(
            ValueError, match=r"recipe wide: group_size = 16 does not divide the \d+ values that a head"
        ):
            quantize_model(model, recipe)
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_experts_of_a_mixture_are_refused(enliven: Enliven, calibration_text: list[Tensor]) -> None:
    """They would stay as they are, while the row says 4 bits."""
    model = stock_model({"model_type": "mixtral", "num_local_experts": 4}, enliven)
    experts = r"model\.layers\.0\.mlp\.experts\.gate_up_proj \[4, 80, 24\]"
    for name in ("rtn-w4", "gptq-w4", "w8a8-token"):
        with pytest.raises(ValueError, match=rf"recipe {name}: {experts} is no linear layer, .*as kv8 does"):
            quantize_model(model, named_recipe(name), calibration_text)
    assert quantize_model(model, named_recipe("kv8")) == []


def test_tables_that_were_never_trained_stay(make_model: MakeModel, calibration_text: list[Tensor]) -> None:
    model = make_model(family="mixit")
    table = model.get_parameter("model.layers.0.self_attn.mixing")
    before = table.clone()
    assert quantize_model(model, named_recipe("rtn-w4"), calibration_text)
    assert torch.equal(table, before)


@torch.no_grad()
def test_int8_dynamic_is_as_close_as_torchaos() -> None:
    """Theirs: weights by the channel, inputs by the token, scales absmax / 127.5 and not / 127."""
    torchao = pytest.importorskip("torchao.quantization")
    plain, x = two_layers()
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    torchao.quantize_(theirs, torchao.Int8DynamicActivationInt8WeightConfig())
    by_token = Quantizer(format="int8", granularity="token")
    for name in ("0", "2"):
        weights = Quantizer(format="int8", granularity="channel")
        ours.set_submodule(name, QuantizedLinear(ours.get_submodule(name), weights, by_token))  # type: ignore[arg-type]
    missed, missed_by_theirs = (float((each(x) - plain(x)).norm() / plain(x).norm()) for each in (ours, theirs))
    assert 0.003 < missed < 0.03
    assert missed == pytest.approx(missed_by_theirs, rel=0.25)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@torch.no_grad()
def test_groups_of_integers_are_as_close_as_torchaos(bits: int) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    plain, _ = two_layers()
    theirs = copy.deepcopy(plain)
    dtype = getattr(torch, f"int{bits}")
    torchao.quantize_(theirs, torchao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity.PerGroup(32)))
    weight = plain[0].get_parameter("weight")
    found = Quantizer(format=f"int{bits}", granularity="group", group_size=32).fake_quantize(weight, "weights")
    missed, missed_by_theirs = (
        (each - weight).norm() / weight.norm() for each in (found, theirs[0].get_parameter("weight").dequantize())
    )
    # Theirs reaches from -2^(b - 1): with few bits the lowest value counts
    assert float(missed) == pytest.approx(float(missed_by_theirs), rel={2: 0.6, 3: 0.25, 4: 0.12, 8: 0.06}[bits])
    assert 0.25 < missed * (2 ** (bits - 1) - 0.5) < 1.0


def two_layers() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(32, 128)
