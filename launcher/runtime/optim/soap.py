"""Run Adam in the eigenbasis of Shampoo's preconditioners: SOAP (arXiv 2409.11321, Algorithm 3).

For a matrix of m x n with gradient G, the covariances L = E[G G^T] and R = E[G^T G] are running means, and their
eigenvectors Q_L and Q_R are the basis in which Adam's second moment is taken:

    M = mean of G        V = mean of (Q_L^T G Q_R)^2        W -= lr * Q_L [(Q_L^T M Q_R) / (sqrt(V) + eps)] Q_R^T

with Adam's bias corrections. Every `precondition_frequency` steps the bases are updated by one power iteration and a QR
decomposition. As in the authors' code, the first gradient only sets the bases and changes no weight: in its own
eigenbasis it is diagonal, and Adam would amplify the off-diagonal zeros to full-size noise. A gradient of zeros, which
hidden matrices get if the unembedding starts at zero, has no eigenbasis and is skipped.

A side longer than `precondition_block` is cut into equal blocks, and each block of the matrix has its own bases. In a
wider eigenbasis a larger share of directions has no signal, and Adam scales the noise there to the same size; so
without blocks the change of a layer's map falls with width (docs/optimizers.md; arXiv 2512.05620 found that blocking
mitigates such deviations).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from plumbline.launcher.runtime.optim.kind import Groups, OptimizerKind, Shapes

LEAST_SHARE = 0.25
"""Length of blocks over the one asked for, below which a side hardly has the preconditioner that was asked for."""

SIDES = (0, 1)  # of a matrix: L and Q_L belong to its rows, R and Q_R to its columns; blocks of it are stacked before


class SOAP(torch.optim.Optimizer):
    """Update whole matrices with SOAP and the decay of torch's AdamW (lr x weight_decay).

    Args:
        groups: matrices, with lr, betas, eps, weight_decay, precondition_frequency, precondition_block and
            max_precondition_dim.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                gradient = into_blocks(parameter.grad, group["precondition_block"])
                if state:
                    _update(parameter, gradient, state, group)
                elif gradient.any():
                    _start(state, gradient, group)


def block_length(side: int, longest: int) -> int:
    """Return the largest divisor of a side that is at most `longest`."""
    return next(length for length in range(min(side, longest), 0, -1) if side % length == 0)


def into_blocks(matrix: Tensor, longest: int) -> Tensor:
    """Return the blocks [blocks, p, q] of a matrix [m, n], or the matrix itself if it is one block."""
    m, n = matrix.shape
    p, q = block_length(m, longest), block_length(n, longest)
    return matrix if (p, q) == (m, n) else matrix.view(m // p, p, n // q, q).transpose(1, 2).reshape(-1, p, q)


def out_of_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Return the matrix of a shape that `into_blocks` cut into blocks."""
    if blocks.ndim == 2:
        return blocks
    (m, n), (p, q) = shape, blocks.shape[1:]
    return blocks.view(m // p, n // q, p, q).transpose(1, 2).reshape(m, n)


def _start(state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> None:
    """Set the bases to the eigenvectors of the first gradient's covariances.

    All state is kept contiguous, as in a checkpoint, so that products are bit-identical after a resume.
    """
    state["step"] = 0  # updates so far
    state["exp_avg"], state["exp_avg_sq"] = gradient.new_zeros(gradient.shape), gradient.new_zeros(gradient.shape)
    for side in SIDES:
        size = gradient.shape[side - 2]
        if size <= group["max_precondition_dim"]:
            state[f"covariance_{side}"] = gradient.new_zeros(*gradient.shape[:-2], size, size)
    _accumulate(state, gradient, group["betas"][1])
    for side in SIDES:
        if f"covariance_{side}" in state:
            state[f"basis_{side}"] = torch.linalg.eigh(state[f"covariance_{side}"]).eigenvectors.contiguous()


def _update(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Take one step of Algorithm 3."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].lerp_(into_basis(gradient, state).square(), 1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
    step = out_of_basis(into_basis(mean, state) / root, state)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(out_of_blocks(step, weight.shape), alpha=-group["lr"] / (1 - beta1 ** state["step"]))
    _accumulate(state, gradient, beta2)
    if state["step"] % group["precondition_frequency"] == 0:
        _refresh_bases(state)


def _accumulate(state: dict[str, Any], gradient: Tensor, beta: float) -> None:
    for side, facing in zip(SIDES, (gradient, gradient.mT), strict=True):
        if f"covariance_{side}" in state:
            state[f"covariance_{side}"].lerp_(facing @ facing.mT, 1 - beta)


def _refresh_bases(state: dict[str, Any]) -> None:
    """Rotate the bases by one power iteration, largest eigenvalue first, and reorder the second moment with them."""
    for side in SIDES:
        if f"basis_{side}" not in state:
            continue
        basis = state[f"basis_{side}"]
        product = state[f"covariance_{side}"] @ basis
        order = (basis * product).sum(-2, keepdim=True).argsort(-1, descending=True)  # (..., 1, size)
        state[f"basis_{side}"] = torch.linalg.qr(product.take_along_dim(order, -1)).Q.contiguous()
        along = order if side == 1 else order.mT
        state["exp_avg_sq"] = state["exp_avg_sq"].take_along_dim(along, side - 2).contiguous()


def into_basis(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return Q_L^T matrix Q_R; a side without a preconditioner is unchanged."""
    if "basis_0" in state:
        matrix = state["basis_0"].mT @ matrix
    return matrix @ state["basis_1"] if "basis_1" in state else matrix


def out_of_basis(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return Q_L matrix Q_R^T, the inverse of `into_basis`."""
    if "basis_0" in state:
        matrix = state["basis_0"] @ matrix
    return matrix @ state["basis_1"].mT if "basis_1" in state else matrix


class SOAPKeys(BaseModel):
    """Hold the keys of the optimizer section that only SOAP uses."""

    precondition_frequency: PositiveInt | None = None
    """For `name: soap`: steps between updates of the eigenbases. None: 10."""
    precondition_block: PositiveInt | None = Field(default=None, json_schema_extra={"shapes": "state"})
    """For `name: soap`: longest side of a block with its own bases. None: 10000, whole matrices; with at most the
    base's hidden_size the change of a layer's map falls less over width (docs/optimizers.md)."""
    max_precondition_dim: PositiveInt | None = Field(default=None, json_schema_extra={"shapes": "state"})
    """For `name: soap`: longest side of a block that gets a preconditioner (a side of n costs 8 n^2 bytes). None:
    10000."""


def _make(groups: Groups, _sharded: bool) -> torch.optim.Optimizer:
    return SOAP(groups)


def _covariances_and_bases(shape: tuple[int, ...], keys: SOAPKeys) -> float:
    assert keys.max_precondition_dim is not None, "the configuration fills it in"
    assert keys.precondition_block is not None, "likewise"
    lengths = [block_length(side, keys.precondition_block) for side in shape]
    blocks = math.prod(shape) / math.prod(lengths)
    return blocks * sum(8.0 * length**2 for length in lengths if length <= keys.max_precondition_dim)


def _cautions(keys: SOAPKeys, base_hidden_size: int | None, shapes: Shapes) -> Iterator[str]:
    longest = keys.precondition_block
    assert longest is not None, "the configuration fills it in"
    if base_hidden_size is not None and longest > base_hidden_size:
        yield (
            f"optimizer.precondition_block = {longest} is wider than the base ({base_hidden_size}): "
            "with bases that grow with the width, what was tuned at the base moves wider layers less; set "
            f"optimizer.precondition_block={base_hidden_size}, at the base as well (docs/optimizers.md)"
        )
    sides = {side: name for name, shape in shapes.items() for side in shape}
    for side, name in sides.items():
        length = block_length(side, longest)
        if length < LEAST_SHARE * min(side, longest):
            yield (
                f"optimizer.precondition_block = {longest}: the side of {side} of {name} is cut into blocks of "
                f"{length}, its largest divisor up to that, and so small a basis does little; give the model a size "
                f"that {longest} divides, or choose an optimizer.precondition_block that divides {side}"
            )


SOAP_KIND = OptimizerKind(
    "soap",
    _make,
    own_keys={"precondition_frequency": 10, "precondition_block": 10_000, "max_precondition_dim": 10_000},
    cautions=_cautions,
    state_beyond_adamw=_covariances_and_bases,
)
