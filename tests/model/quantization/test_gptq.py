"""GPTQ against the method it is a fast form of, one column at a time with the whole inverse, in fp64."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from plumbline.model.quantization.post_training.gptq import gptq
from plumbline.model.quantization.quantizer import Grid, Quantizer

CHANNEL = Quantizer(format="int3", granularity="channel")
KINDS = [
    CHANNEL,
    Quantizer(format="int4", granularity="tensor"),
    Quantizer(format="int4", granularity="channel", symmetric=False, scales="fp16"),
    Quantizer(format="int3", granularity="group", group_size=8),
    Quantizer(format="int2", granularity="group", group_size=4, symmetric=False),
    Quantizer(format="e2m1", granularity="group", group_size=8, scales="e8m0"),
]


def problem(rows: int = 6, columns: int = 24, tokens: int = 200) -> tuple[Tensor, Tensor]:
    """Return a weight [rows, columns] and correlated inputs [tokens, columns], fp64."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) * torch.linspace(0.2, 2.0, columns)
    inputs = torch.randn(tokens, columns, generator=generator) @ mixing
    return torch.randn(rows, columns, generator=generator).double(), inputs.double()


def one_column_at_a_time(weight: Tensor, products: Tensor, quantizer: Quantizer, damping: float) -> Tensor:
    """Optimal brain quantization from left to right, with the inverse of what remains after each column."""
    weight, width = weight.clone(), quantizer.group_size or weight.size(1)
    whole = quantizer.grid(weight, "weights")
    inverse = (products + damping * products.diagonal().mean() * torch.eye(len(products))).inverse()
    for j in range(weight.size(1)):
        if j % width == 0 and quantizer.group_size is not None:
            whole = quantizer.grid(weight[:, j : j + width], "weights")
        scale, zero = (None if part is None else part.flatten(1) for part in (whole.scale, whole.zero))
        assert scale is not None
        rounded = Grid(whole.format, scale, zero).round(weight[:, j : j + 1])
        weight[:, j + 1 :] -= (weight[:, j : j + 1] - rounded) / inverse[j, j] * inverse[j, j + 1 :]
        weight[:, j : j + 1] = rounded
        inverse = inverse - inverse[:, j].outer(inverse[j]) / inverse[j, j]
    return weight


@pytest.mark.parametrize("quantizer", KINDS, ids=lambda kind: f"{kind.format}-{kind.granularity}")
@pytest.mark.parametrize("block_size", [1, 5, 12, 128])
def test_gptq_is_optimal_brain_quantization_column_by_column(quantizer: Quantizer, block_size: int) -> None:
    weight, inputs = problem()
    products = inputs.T @ inputs
    rounded, grid = gptq(weight, products, quantizer, damping=0.03, block_size=block_size)
    torch.testing.assert_close(rounded, one_column_at_a_time(weight, products, quantizer, damping=0.03))
    view, _ = quantizer.blocked(rounded, "weights")
    torch.testing.assert_close(grid.round(view), view)  # the grid that is returned is the one that it lies on
    assert grid.scale.shape == quantizer.grid(weight, "weights").scale.shape


@pytest.mark.parametrize(("bits", "most"), [(3, 0.9), (4, 0.9), (6, 0.9)])
def test_outputs_on_correlated_inputs_are_closer_than_after_rounding_to_nearest(bits: int, most: float) -> None:
    weight, inputs = problem(32, 96, 1000)
    quantizer = Quantizer(format=f"int{bits}", granularity="channel")
    rounded, _ = gptq(weight.float(), inputs.T @ inputs, quantizer)
    nearest = quantizer.fake_quantize(weight, "weights")
    missed, missed_by_nearest = ((inputs @ (each - weight).T).norm() for each in (rounded.double(), nearest))
    assert missed < most * missed_by_nearest
    assert (rounded - weight).norm() > (nearest - weight).norm()  # it is not the weight that is kept


def test_columns_in_order_of_their_inputs() -> None:
    weight, inputs = problem()
    products = inputs.T @ inputs
    order = products.diagonal().argsort(descending=True)
    assert not torch.equal(order, torch.arange(24))
    rounded, _ = gptq(weight, products, CHANNEL, act_order=True, damping=0.03, block_size=10)
    expected = one_column_at_a_time(weight[:, order], products[order][:, order], CHANNEL, damping=0.03)
    torch.testing.assert_close(rounded[:, order], expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_out_of_order_keep_the_grids_of_the_unchanged_weight(symmetric: bool) -> None:
    weight, inputs = problem()
    quantizer = Quantizer(format="int3", granularity="group", group_size=8, symmetric=symmetric)
    rounded, grid = gptq(weight, inputs.T @ inputs, quantizer, act_order=True)
    own = quantizer.grid(weight, "weights")
    assert torch.equal(grid.scale, own.scale)
    view, _ = quantizer.blocked(rounded, "weights")
    torch.testing.assert_close(own.round(view), view)
    assert (inputs @ (rounded - weight).T).norm() < (
        inputs @ (quantizer.fake_quantize(weight, "weights") - weight).T
    ).norm()


def test_scales_relative_to_the_whole_tensor_stay_those_of_the_unchanged_weight() -> None:
    weight, inputs = problem()
    quantizer = Quantizer(format="e2m1", granularity="group", group_size=8, scales="e4m3")
    _, grid = gptq(weight, inputs.T @ inputs, quantizer)
    assert torch.equal(grid.scale, quantizer.grid(weight, "weights").scale)


def test_an_input_that_is_always_zero_loses_its_column_and_changes_nothing_else() -> None:
    weight, inputs = problem()
    weight[:, 7] = 100.0  # would widen every grid
    inputs[:, 7] = 0.0
    rounded, _ = gptq(weight, inputs.T @ inputs, CHANNEL)
    others = torch.arange(24) != 7
    without, _ = gptq(weight[:, others], inputs[:, others].T @ inputs[:, others], CHANNEL)
    assert torch.equal(rounded[:, 7], torch.zeros(6).double())
    torch.testing.assert_close(rounded[:, others], without)


def test_inputs_fewer_than_columns_and_inputs_that_overflowed() -> None:
    weight, inputs = problem(tokens=5)
    rounded, _ = gptq(weight.float(), inputs.T @ inputs, CHANNEL)
    assert rounded.isfinite().all()
    rounded, _ = gptq(weight, torch.zeros(24, 24), CHANNEL)  # a layer that is never reached
    assert torch.equal(rounded, torch.zeros_like(weight))
    with pytest.raises(ValueError, match=r"damping = 1e-30: too little .*; raise it \(0\.01 is usual\)"):
        gptq(weight, inputs.T @ inputs, CHANNEL, damping=1e-30)
    inputs[0, 0] = torch.inf
    with pytest.raises(ValueError, match="the inputs on the calibration text are not finite"):
        gptq(weight, inputs.T @ inputs, CHANNEL)


def test_the_weight_that_is_given_stays_as_it_is() -> None:
    weight, inputs = problem()
    products = inputs.T @ inputs
    before = weight.clone(), products.clone()
    gptq(weight, products, CHANNEL)
    assert torch.equal(weight, before[0])
    assert torch.equal(products, before[1])


@pytest.mark.parametrize("ends", ["absmax", "mse"])
@pytest.mark.parametrize("act_order", [False, True])
def test_groups_of_two_bits_lose_less_on_other_text_than_rounding_to_nearest(
    ends: Literal["absmax", "mse"], act_order: bool
) -> None:
    """Where a grid has four values, the updates of later columns widen the groups that are still to come."""
    quantizer = Quantizer(format="int2", granularity="group", group_size=32, full_range=True, range=ends, scales="fp16")
    absmax = quantizer.model_copy(update={"range": "absmax"})
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        mixing = torch.randn(96, 96, generator=generator) * torch.linspace(0.2, 2.0, 96)
        seen, unseen = (torch.randn(1000, 96, generator=generator) @ mixing for _ in range(2))
        weight = torch.randn(32, 96, generator=generator)
        rounded, _ = gptq(weight, (seen.T @ seen).double(), quantizer, act_order)
        missed, missed_by_nearest = (
            (unseen @ (each - weight).T).norm() for each in (rounded, absmax.fake_quantize(weight, "weights"))
        )
        assert missed < missed_by_nearest, seed
