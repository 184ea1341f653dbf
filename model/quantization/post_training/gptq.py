"""Round columns one by one, so that later ones compensate for the errors of earlier ones (GPTQ, arXiv 2210.17323).

With inputs X [tokens, in] and H = X^T X, each column in turn is rounded to its grid, and the rest of the row moves by
-(w - q) [H^-1]_j,: / [H^-1]_jj, which best compensates for the error in X W^T. The required rows, of inverses of
successively smaller H, are those of the upper Cholesky factor of the first H^-1.
"""

import torch
from torch import Tensor

from plumbline.model.quantization.post_training.method import Method, MethodSettings
from plumbline.model.quantization.quantizer import Grid, Quantizer


def gptq(
    weight: Tensor,
    products: Tensor,
    quantizer: Quantizer,
    act_order: bool = False,
    damping: float = 0.01,
    block_size: int = 128,
) -> tuple[Tensor, Grid]:
    """Round a weight so that its outputs change as little as possible.

    Groups get their grid when their first column is reached, from the columns' current values. With `act_order` the
    columns of a group are not consecutive, so all grids are those of the unchanged weight ("static groups"); so are
    e4m3 scales, which are relative to the whole tensor.

    Args:
        weight: [out, in], in fp32 or fp64, which is the precision of all updates.
        products: sum of x x^T over the inputs x of the calibration text, [in, in]. An input that is always 0 loses its
            column.
        quantizer: quantizer of the weight.
        act_order: process columns by descending second moment of the inputs, not from left to right.
        damping: added to the diagonal, as a share of the mean second moment.
        block_size: columns between two updates of all later ones.

    Returns:
        The rounded weight and the grid that it lies on.

    Raises:
        ValueError: the inputs are not finite, or so few that they take more damping.
    """
    hessian, dead = _damped(products, damping)
    weight = weight.masked_fill(dead, 0.0)
    whole = quantizer.grid(weight, "weights")
    columns = weight.size(1)
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(columns, device=weight.device)
    try:
        factor = _inverse_factor(hessian[order][:, order]).to(weight.dtype)
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        raise ValueError(
            f"damping = {damping:g}: too little to invert the moments of these inputs; raise it (0.01 is usual), "
            "or calibrate on more tokens"
        ) from cause
    weight = weight[:, order]

    width = quantizer.group_size or columns
    is_fixed = act_order or quantizer.group_size is None or quantizer.scales == "e4m3"
    if not is_fixed:  # a group's columns must be up to date when it is reached, so it has to lie within one block
        block_size = max(width, block_size // width * width)
    scale = whole.scale.reshape(-1, columns // width)
    zero = None if whole.zero is None else whole.zero.reshape(scale.shape)
    places = order.tolist()
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        errors = torch.empty_like(weight[:, start:stop])
        for j in range(start, stop):
            group = places[j] // width
            if not is_fixed and j % width == 0:
                fresh = quantizer.grid(weight[:, j : j + width], "weights")
                scale[:, group] = fresh.scale.flatten()
                if zero is not None and fresh.zero is not None:
                    zero[:, group] = fresh.zero.flatten()
            own = slice(group, group + 1)
            grid = Grid(whole.format, scale[:, own], None if zero is None else zero[:, own])
            column = weight[:, j : j + 1]
            rounded = grid.round(column)
            error = (column - rounded) / factor[j, j]
            weight[:, j + 1 : stop] -= error * factor[j, j + 1 : stop]
            weight[:, j : j + 1], errors[:, j - start : j - start + 1] = rounded, error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    zero = None if zero is None else zero.view(whole.scale.shape)
    return weight[:, order.argsort()], Grid(whole.format, scale.view(whole.scale.shape), zero)


def _damped(products: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return an invertible H in fp64, and which inputs are always 0."""
    hessian = products.double().clone()
    if not hessian.isfinite().all():
        raise ValueError("the inputs on the calibration text are not finite: the model overflows before this layer")
    diagonal = hessian.diagonal()  # a view
    dead = diagonal == 0
    share = damping * diagonal.sum() / (~dead).sum().clamp_min(1)
    diagonal[dead] = 1.0
    diagonal += share
    return hessian, dead


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper triangular U with U^T U = H^-1."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _round(
    weight: Tensor, products: Tensor | None, quantizer: Quantizer, settings: MethodSettings
) -> tuple[Tensor, Grid]:
    assert products is not None, "a recipe that needs text is refused without"
    return gptq(weight, products, quantizer, settings.act_order, settings.damping, settings.block_size)


GPTQ = Method(_round, needs_text=True, orders_columns=True)
