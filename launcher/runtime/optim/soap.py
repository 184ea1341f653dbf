"""Run Adam in the eigenbasis of Shampoo's preconditioners: SOAP (arXiv 2409.11321, Algorithm 3).

For a matrix of m x n with gradient G, the covariances L = E[G G^T] and R = E[G^T G] are running means, and their
eigenvectors Q_L and Q_R a basis in which Adam's second moment is taken:

    M = mean of G        V = mean of (Q_L^T G Q_R)^2        W -= lr * Q_L [(Q_L^T M Q_R) / (sqrt(V) + eps)] Q_R^T

with Adam's bias corrections. Every `precondition_frequency` steps the bases follow the covariances by one power
iteration and a QR decomposition. As in the authors' code, the first gradient only sets the bases and changes no weight:
in its own eigenbasis it is diagonal, and Adam would blow the zeros beside the diagonal up to noise of full size.
"""

import math
from typing import Any

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from plumbline.launcher.runtime.optim.kind import Groups, OptimizerKind

SIDES = (0, 1)  # of a matrix: L and Q_L belong to its rows, R and Q_R to its columns


class SOAP(torch.optim.Optimizer):
    """Update whole matrices by SOAP, with PyTorch's coupled decay (a step decays by lr x weight_decay).

    Args:
        groups: matrices, with lr, betas, eps, weight_decay, precondition_frequency and max_precondition_dim.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if state:
                    _update(parameter, parameter.grad, state, group)
                else:
                    _start(state, parameter.grad, group)


def _start(state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> None:
    """Set the bases to the eigenvectors of the first gradient's covariances."""
    state["step"] = 0  # updates made
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    for side in SIDES:
        size = gradient.shape[side]
        if size <= group["max_precondition_dim"]:
            state[f"covariance_{side}"] = gradient.new_zeros(size, size)
    _accumulate(state, gradient, group["betas"][1])
    for side in SIDES:
        if f"covariance_{side}" in state:
            state[f"basis_{side}"] = torch.linalg.eigh(state[f"covariance_{side}"]).eigenvectors


def _update(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Take one step of Algorithm 3."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].lerp_(into_basis(gradient, state).square(), 1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
    step = out_of_basis(into_basis(mean, state) / root, state)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(step, alpha=-group["lr"] / (1 - beta1 ** state["step"]))
    _accumulate(state, gradient, beta2)
    if state["step"] % group["precondition_frequency"] == 0:
        _refresh_bases(state)


def _accumulate(state: dict[str, Any], gradient: Tensor, beta: float) -> None:
    for side, facing in zip(SIDES, (gradient, gradient.T), strict=True):
        if f"covariance_{side}" in state:
            state[f"covariance_{side}"].lerp_(facing @ facing.T, 1 - beta)


def _refresh_bases(state: dict[str, Any]) -> None:
    """Turn the bases by one power iteration, largest eigenvalue first; the second moment follows their order."""
    for side in SIDES:
        if f"basis_{side}" not in state:
            continue
        basis = state[f"basis_{side}"]
        product = state[f"covariance_{side}"] @ basis
        order = (basis * product).sum(0).argsort(descending=True)
        state[f"basis_{side}"] = torch.linalg.qr(product[:, order]).Q
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(side, order)


def into_basis(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return Q_L^T matrix Q_R; a side without a preconditioner stays as it is."""
    if "basis_0" in state:
        matrix = state["basis_0"].T @ matrix
    return matrix @ state["basis_1"] if "basis_1" in state else matrix


def out_of_basis(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return Q_L matrix Q_R^T: the way back."""
    if "basis_0" in state:
        matrix = state["basis_0"] @ matrix
    return matrix @ state["basis_1"].T if "basis_1" in state else matrix


class SOAPKeys(BaseModel, use_attribute_docstrings=True):
    """Hold the keys of the optimizer section that SOAP alone uses."""

    precondition_frequency: PositiveInt | None = None
    """soap: steps between refreshes of the eigenbases. Default: 10."""
    max_precondition_dim: PositiveInt | None = Field(default=None, json_schema_extra={"shapes": "state"})
    """soap: longer sides of a matrix get no preconditioner (a side of n costs 8 n^2 bytes). Default: 10000."""


def _make(groups: Groups, _sharded: bool) -> torch.optim.Optimizer:
    return SOAP(groups)


def _covariances_and_bases(shape: tuple[int, ...], keys: SOAPKeys) -> float:
    assert keys.max_precondition_dim is not None, "the configuration fills it in"
    return sum(8.0 * size**2 for size in shape if size <= keys.max_precondition_dim)


SOAP_KIND = OptimizerKind(
    "soap",
    _make,
    own_keys={"precondition_frequency": 10, "max_precondition_dim": 10_000},
    zero_stages=(0,),  # the state of a matrix cannot be cut
    state_beyond_adamw=_covariances_and_bases,
)
