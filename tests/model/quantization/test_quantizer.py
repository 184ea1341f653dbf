"""Number formats and quantizers: grids written out by hand, torch's own floats, torchao's codecs, straight-through."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from plumbline.model.quantization.formats import Float, Integer, parse_format, power_of_two
from plumbline.model.quantization.precision import BLOCK_FORMATS, PrecisionConfig, named_quantizer
from plumbline.model.quantization.quantizer import Limits, Quantizer


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(quantizer: Quantizer, x: Tensor) -> float:
    return float((quantizer.fake_quantize(x, "weights") - x).norm() / x.norm())


def test_powers_of_two_are_exact() -> None:
    exponents = range(-126, 128)
    assert power_of_two(torch.tensor(exponents, dtype=torch.int32)).tolist() == [2.0**each for each in exponents]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
        ("e5m10", torch.float16),
        ("e8m7", torch.bfloat16),
    ],
)
def test_floats_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    """From subnormals to saturation, ties included."""
    numbers = parse_format(name)
    x = normal(20_000) * 10 ** torch.linspace(-8, 6, 20_000)
    x = torch.cat((x, torch.tensor([0.0, -0.0, 464.0, 416.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1e-40])))
    expected = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float()
    assert numbers.largest == torch.finfo(dtype).max
    assert numbers.bits == dtype.itemsize * 8
    assert torch.equal(numbers.round(x), expected)


def test_small_floats_hold_what_their_codes_say() -> None:
    """Every code of a sign, exponents and mantissas decoded by hand."""
    for exponent_bits, mantissa_bits in product((2, 3, 4), (0, 1, 2)):
        numbers = Float(exponent_bits, mantissa_bits)
        bias = 2 ** (exponent_bits - 1) - 1
        values = {0.0}
        for e, m in product(range(2**exponent_bits), range(2**mantissa_bits)):
            fraction = m / 2**mantissa_bits
            values.add(2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction))
        x = torch.linspace(-1.2 * max(values), 1.2 * max(values), 4001)
        grid = torch.tensor(sorted({*values, *(-value for value in values)}))
        rounded = numbers.round(x)
        assert set(rounded.tolist()) <= set(grid.tolist())
        assert set(numbers.round(grid).tolist()) == set(grid.tolist())
        torch.testing.assert_close((rounded - x).abs(), (x[:, None] - grid).abs().amin(1))


def test_the_names_of_formats() -> None:
    assert parse_format("int3") == Integer(3)
    assert parse_format("e2m1") == Float(2, 1)
    assert [parse_format(name).largest for name in ("e2m1", "e2m3", "e3m2", "int16")] == [6.0, 7.5, 28.0, 32767.0]
    for name in ("int1", "int17", "fp8", "e1m2", "e9m2", "int", "e4m11"):
        with pytest.raises(ValueError, match=f"'{name}' is no number format"):
            parse_format(name)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 11, 16])
def test_symmetric_integers_land_on_the_nearest_level(bits: int) -> None:
    x = normal(40, 7)
    levels = torch.arange(-(2 ** (bits - 1) - 1), 2 ** (bits - 1)) * float(x.abs().max()) / (2 ** (bits - 1) - 1)
    rounded = Quantizer(format=f"int{bits}").fake_quantize(x, "weights")
    torch.testing.assert_close(rounded, levels[torch.searchsorted((levels[1:] + levels[:-1]) / 2, x)])
    assert float(rounded.abs().max()) == pytest.approx(float(x.abs().max()))


@pytest.mark.parametrize(
    ("site", "granularity", "shape", "own"),
    [
        ("weights", "channel", (6, 8), (6, 1)),
        ("activations", "token", (2, 5, 8), (2, 5, 1)),
        ("activations", "token", (5, 8), (5, 1)),
        ("activations", "channel", (2, 5, 8), (1, 1, 8)),
        ("kv_cache", "head", (2, 3, 5, 4), (1, 3, 1, 1)),
        ("kv_cache", "channel", (2, 3, 5, 4), (1, 3, 1, 4)),
        ("kv_cache", "token", (2, 3, 5, 4), (2, 3, 5, 1)),
    ],
)
def test_values_that_share_a_scale(site: Any, granularity: Any, shape: tuple[int, ...], own: tuple[int, ...]) -> None:
    """A scale for each place along the dimensions that are named, from the values of that place alone."""
    x = normal(*shape)
    for symmetric in (True, False):
        grid = Quantizer(format="int8", granularity=granularity, symmetric=symmetric).grid(x, site)
        assert grid.scale.shape == own
        dims = [dim for dim, size in enumerate(own) if size == 1]
        low, high = x.amin(dims, keepdim=True).clamp_max(0), x.amax(dims, keepdim=True).clamp_min(0)
        reach = torch.maximum(high, -low) / 127 if symmetric else (high - low) / 255
        torch.testing.assert_close(grid.scale, reach)


@pytest.mark.parametrize("site", ["activations", "kv_cache"])
@pytest.mark.parametrize("scales", ["fp32", "e8m0", "e4m3"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "token", "head", "group"])
def test_a_quantizer_knows_whether_other_tokens_change_how_one_is_rounded(
    site: Any, granularity: Any, scales: Any
) -> None:
    if granularity == "head" and site == "activations":
        return
    group = 8 if granularity == "group" else None
    quantizer = Quantizer(format="int4", granularity=granularity, group_size=group, scales=scales)
    x = torch.randn(2, 3, 6, 16, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, :, 1:] *= 20.0
    same = quantizer.fake_quantize(x, site)[:, :, 0].equal(quantizer.fake_quantize(other, site)[:, :, 0])
    assert quantizer.spans_tokens(site) is not same


def test_groups_are_neighbours_along_a_row() -> None:
    x = normal(4, 12)
    whole = Quantizer(format="int4", granularity="group", group_size=3).fake_quantize(x, "weights")
    parts = [Quantizer(format="int4", granularity="channel").fake_quantize(part, "weights") for part in x.split(3, 1)]
    assert torch.equal(whole, torch.cat(parts, dim=1))
    with pytest.raises(ValueError, match="group_size = 5 does not divide the 12"):
        Quantizer(format="int4", granularity="group", group_size=5).fake_quantize(x, "weights")


def test_asymmetric_grids_hold_both_ends_and_zero() -> None:
    x = torch.cat((normal(50).abs() + 3, torch.zeros(1)))[None]
    rounded = Quantizer(format="int4", granularity="channel", symmetric=False).fake_quantize(x, "weights")
    assert rounded.max() == pytest.approx(float(x.max()))
    assert rounded[0, -1] == 0.0
    assert len(rounded.unique()) <= 16
    coarse = Quantizer(format="int4", granularity="channel").fake_quantize(x, "weights")
    assert (rounded - x).norm() < 0.6 * (coarse - x).norm()


def test_one_outlier_costs_all_others_unless_the_range_leaves_it_out() -> None:
    x = torch.cat((normal(10_000), torch.tensor([300.0])))[None]
    rest = x[:, :-1]
    plain, percentile, mse = (
        Quantizer(format="int8", **kind).fake_quantize(x, "weights")
        for kind in ({"range": "absmax"}, {"range": "percentile", "percentile": 99.9}, {"range": "mse"})
    )
    assert (percentile[:, :-1] - rest).norm() < 0.1 * (plain[:, :-1] - rest).norm()
    assert percentile.max() < 5
    assert (mse - x).norm() <= (plain - x).norm()
    heavy = normal(4, 4096, seed=1) ** 3
    absmax, best = (Quantizer(format="int3", granularity="channel", range=kind) for kind in ("absmax", "mse"))
    assert error(best, heavy) < 0.8 * error(absmax, heavy)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("mxfp8", 0.028, 0.030),
        ("mxfp8_e5m2", 0.053, 0.056),
        ("mxfp6", 0.027, 0.030),
        ("mxfp6_e3m2", 0.053, 0.056),
        ("mxfp4", 0.110, 0.118),
        ("nvfp4", 0.092, 0.098),
    ],
)
def test_block_formats_round_normal_weights_as_well_as_is_known(name: str, least: float, most: float) -> None:
    assert least < error(BLOCK_FORMATS[name], normal(64, 256)) < most


def test_block_formats_equal_torchaos() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = normal(32, 128) * 10 ** torch.linspace(-3, 3, 32)[:, None]
    x[3, 32:64] = 0.0
    dtypes = {
        "mxfp8": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp4": torch.float4_e2m1fn_x2,
    }
    for name, dtype in dtypes.items():
        expected = mx.MXTensor.to_mx(x, dtype, 32).dequantize(torch.float32)
        assert torch.equal(BLOCK_FORMATS[name].fake_quantize(x, "weights"), expected), name
    # torchao's smallest block scale is the least normal E4M3; ours may be subnormal, which matters for tiny blocks only
    for seed in range(4):
        x = torch.randn(256, 512, generator=torch.Generator().manual_seed(seed))
        x *= 10 ** torch.linspace(-1, 1, 256)[:, None]
        x[3, 32:64] = 0.0
        scale = nv.per_tensor_amax_to_scale(x.abs().max())
        expected = nv.NVFP4Tensor.to_nvfp4(x, 16, scale).dequantize(torch.float32)
        # The product of the two scales is rounded in another order
        torch.testing.assert_close(BLOCK_FORMATS["nvfp4"].fake_quantize(x, "weights"), expected, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64])
def test_integers_equal_torchaos(symmetric: bool, group: int) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    mapping = primitives.MappingType.SYMMETRIC_NO_CLIPPING_ERR if symmetric else primitives.MappingType.ASYMMETRIC
    for bits in (2, 3, 4, 8):
        linear, x = torch.nn.Linear(64, 16, bias=False), normal(16, 64)
        linear.weight.data.copy_(x)  # drawn by chance, one might lie between two integers
        dtype = getattr(torch, f"int{bits}")
        torchao.quantize_(linear, torchao.IntxWeightOnlyConfig(dtype, torchao.PerGroup(group), mapping))
        expected: Any = linear.weight
        quantizer = Quantizer(
            format=f"int{bits}", granularity="group", group_size=group, symmetric=symmetric, full_range=symmetric
        )
        torch.testing.assert_close(quantizer.fake_quantize(x, "weights"), expected.dequantize(), rtol=1e-6, atol=1e-7)


def test_scales_of_fp16_reach_down_to_its_subnormals_and_clip_nothing() -> None:
    quantizer = Quantizer(format="int8", granularity="group", group_size=32, scales="fp16")
    x = normal(64, 256)
    assert error(quantizer, x * 1e-4) < 0.02, "the least normal fp16 as a scale loses 0.18"
    for size in (1e-2, 1e-4, 1e-5, 1e-7):
        scale = quantizer.grid(x * size, "weights").scale
        exact = (x * size).unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        assert torch.equal(scale, scale.half().float())
        assert torch.equal(scale[exact >= 2**-14], exact.half().float()[exact >= 2**-14])
        assert (scale >= exact)[exact < 2**-14].all()
    assert (quantizer.grid(torch.zeros(2, 32), "weights").scale == 2**-24).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [9, 10, 11, 12, 16])
def test_scales_of_fp16_are_fine_enough_for_every_code(bits: int, symmetric: bool) -> None:
    quantizer = Quantizer(format=f"int{bits}", granularity="channel", scales="fp16", symmetric=symmetric)
    x = torch.cat((normal(256, 64).abs(), -normal(256, 64, seed=1).abs(), normal(256, 64, seed=2), torch.zeros(1, 64)))
    for size in (1.0, 1e-4):
        grid = quantizer.grid(x * size, "weights")
        assert torch.equal(grid.scale, grid.scale.half().float())
        assert ((grid.round(x * size) - x * size).abs() <= 0.51 * grid.scale).all()
        assert grid.zero is None or grid.zero.max() < 2**bits
    assert quantizer.grid(x[-1:], "weights").scale == 2**-24


def test_a_zero_point_is_a_code_whatever_the_scale_lost() -> None:
    quantizer = Quantizer(format="int4", granularity="channel", scales="e4m3", symmetric=False)
    zero = quantizer.grid(-normal(512, 64).abs(), "weights").zero
    assert zero is not None
    assert zero.max() == 15


def test_the_scale_of_a_block_that_spans_the_whole_tensor_is_stored() -> None:
    """Of scales that are relative to one for the tensor: codes reach from the least value to the largest."""
    x = torch.stack((torch.linspace(-1, 1, 16), torch.linspace(0, 1, 16), torch.linspace(-1, 0.25, 16)))
    quantizer = Quantizer(format="int4", granularity="group", group_size=16, scales="e4m3", symmetric=False)
    steps = (x.amax(1) - x.amin(1)) / 15
    # The nearest code is within half a step, scales within 2^-4 of themselves, over 15 steps
    assert ((quantizer.fake_quantize(x, "weights") - x).abs().amax(1) < (0.5 + 15 / 16) * steps).all()


def test_gradients_pass_straight_through_what_the_grid_holds() -> None:
    x = normal(3, 8).requires_grad_()
    upstream = normal(3, 8, seed=1)
    Quantizer(format="int3", granularity="channel").fake_quantize(x, "weights").backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)
    x = x.detach().requires_grad_()
    limits = Limits(torch.tensor(-1.0), torch.tensor(1.0))
    rounded = Quantizer(format="int8").fake_quantize(x, "activations", limits)
    rounded.backward(upstream)
    within = (x >= -128.5 / 127) & (x <= 127.5 / 127)  # codes reach from -128 to 127
    torch.testing.assert_close(x.grad, torch.where(within, upstream, 0.0), rtol=0, atol=0)
    assert float(rounded.detach().max()) == pytest.approx(1.0)
    assert float(rounded.detach().min()) == pytest.approx(-128 / 127)


def test_the_gradient_ends_half_a_step_beyond_both_ends() -> None:
    limits = Limits(torch.tensor(-1.0), torch.tensor(1.0))
    steps = torch.tensor([-128.6, -128.4, -128.0, 127.0, 127.4, 127.6])
    x = (steps / 127).requires_grad_()
    Quantizer(format="int8").fake_quantize(x, "activations", limits).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]


def test_a_scale_beyond_half_precision_is_its_largest() -> None:
    """Or it would be infinite, and all values nan."""
    x = torch.full((1, 4), 1e7)
    for bits in (4, 8):
        quantizer = Quantizer(format=f"int{bits}", granularity="channel", scales="fp16")
        largest = torch.finfo(torch.float16).max * (2 ** (bits - 1) - 1)
        rounded = quantizer.fake_quantize(x, "weights")
        assert torch.isfinite(rounded).all()
        assert float(rounded.max()) == pytest.approx(min(1e7, largest), rel=0.15)


def test_the_gradient_passes_what_a_coarse_scale_cuts_off() -> None:
    x = torch.tensor([[7.9, 1.0, -0.5, 0.2] * 8], requires_grad=True)
    rounded = BLOCK_FORMATS["mxfp4"].fake_quantize(x, "weights")
    rounded.sum().backward()
    assert float(rounded.detach().max()) == 6.0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_shapes_dtypes_and_zeros_survive() -> None:
    quantizers = [*BLOCK_FORMATS.values(), Quantizer(format="int4", symmetric=False), Quantizer(format="e4m3")]
    for quantizer in quantizers:
        x = normal(2, 64).bfloat16()
        rounded = quantizer.fake_quantize(x, "activations")
        assert (rounded.shape, rounded.dtype) == (x.shape, x.dtype)
        assert torch.equal(quantizer.fake_quantize(torch.zeros(2, 64), "activations"), torch.zeros(2, 64))


def test_what_is_stored_for_each_weight() -> None:
    shape = (64, 128)
    assert Quantizer(format="int4").stored_bits(shape) == 4 + 32 / (64 * 128)
    assert Quantizer(format="int4", granularity="channel", scales="fp16").stored_bits(shape) == 4 + 16 / 128
    assert (
        Quantizer(format="int3", granularity="group", group_size=32, symmetric=False).stored_bits(shape) == 3 + 35 / 32
    )
    bits = {name: quantizer.stored_bits(shape) for name, quantizer in BLOCK_FORMATS.items()}
    assert bits["mxfp4"] == 4.25
    assert bits["mxfp8"] == 8.25
    assert bits["nvfp4"] == 4.5 + 32 / (64 * 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "int4", "granularity": "group"}, "group_size = None"),
        ({"format": "int4", "group_size": 32}, "granularity = tensor, group_size = 32"),
        ({"format": "e4m3", "symmetric": False}, "only integers have a zero point"),
        ({"format": "int4", "symmetric": False, "scales": "e8m0"}, "symmetric = false, scales = e8m0: powers of two"),
        ({"format": "int99"}, "'int99' is no number format"),
        ({"format": "e4m3", "full_range": True}, "about symmetric integers"),
        ({"format": "int4", "full_range": True, "symmetric": False}, "about symmetric integers"),
        ({"format": "int4", "percentile": 99.0}, "percentile = 99, range = absmax: only range = percentile reads it"),
        ({"format": "int4", "range": "mse", "percentile": 99.0}, "percentile = 99, range = mse: only"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Quantizer(**settings)


def test_precision_in_short_is_that_of_the_paper() -> None:
    config = PrecisionConfig.model_validate({"weights": 4, "activations": "e4m3", "kv_cache": "mxfp4"})
    assert config.weights == Quantizer(format="int4", granularity="channel")
    assert config.activations == Quantizer(format="e4m3", granularity="tensor")
    assert config.kv_cache == BLOCK_FORMATS["mxfp4"]
    assert PrecisionConfig().is_plain
    assert named_quantizer(8, "activations") == Quantizer(format="int8", granularity="tensor")
    full = PrecisionConfig.model_validate({"activations": {"format": "int8", "granularity": "token"}})
    assert full.activations == Quantizer(format="int8", granularity="token")
    for wrong in ({"weights": 1}, {"weights": "fp8"}, {"weights": {"format": "int8", "granularity": "token"}}):
        with pytest.raises(ValidationError, match="weights"):
            PrecisionConfig.model_validate(wrong)
