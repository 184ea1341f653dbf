"""SOAP is its paper's algorithm, sees no coordinates, and is Adam where it has no preconditioners."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.optim.soap import SOAP

SOAP_GROUP: dict[str, Any] = {
    "lr": 0.03,
    "betas": (0.8, 0.9),
    "eps": 1e-6,
    "weight_decay": 0.2,
    "precondition_frequency": 3,
    "precondition_block": 100,
    "max_precondition_dim": 100,
}


def soap_run(weight: Tensor, gradients: list[Tensor], **changes: Any) -> tuple[Tensor, SOAP]:
    parameter = nn.Parameter(weight.clone())
    optimizer = SOAP([{"params": [parameter], **SOAP_GROUP, **changes}])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer


def random_problem(*shape: int, steps: int = 9) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps + 1)]
    return draw[0], draw[1:]


@pytest.mark.parametrize("columns", [5, 7])
def test_soap_is_algorithm_3_in_the_rotated_basis(columns: int) -> None:
    """Written out literally: everything rotates into the basis, Adam steps there, its step rotates back.

    Only square matrices are preconditioned on both sides here: otherwise the first covariance of the longer side is
    singular, and the basis of its null space any.
    """
    weight, gradients = random_problem(5, columns)
    lr, (beta1, beta2), eps, decay = 0.03, (0.8, 0.9), 1e-6, 0.2
    left = (1 - beta2) * gradients[0] @ gradients[0].T
    right = (1 - beta2) * gradients[0].T @ gradients[0]
    q_left, q_right = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
    if columns > 5:
        q_right = torch.eye(columns).double()
    expected, mean, square = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for t, gradient in enumerate(gradients[1:], start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * (q_left.T @ gradient @ q_right) ** 2
        rotated = (q_left.T @ mean @ q_right / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + eps)
        expected = expected - lr * decay * expected - lr * q_left @ rotated @ q_right.T
        left = beta2 * left + (1 - beta2) * gradient @ gradient.T
        right = beta2 * right + (1 - beta2) * gradient.T @ gradient
        if t % 3 == 0:
            order = torch.diag(q_left.T @ left @ q_left).argsort(descending=True)
            q_left, square = torch.linalg.qr(left @ q_left[:, order])[0], square[order]
            if columns == 5:
                order = torch.diag(q_right.T @ right @ q_right).argsort(descending=True)
                q_right, square = torch.linalg.qr(right @ q_right[:, order])[0], square[:, order]
    found, _ = soap_run(weight, gradients, max_precondition_dim=5)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_the_first_gradient_only_sets_the_bases() -> None:
    weight, gradients = random_problem(4, 6)
    found, optimizer = soap_run(weight, gradients[:1])
    assert torch.equal(found, weight)
    (state,) = optimizer.state.values()
    left = state["basis_0"]
    rotated = left.T @ gradients[0] @ gradients[0].T @ left
    torch.testing.assert_close(rotated, torch.diag(torch.diag(rotated)))


def test_a_gradient_of_zeros_sets_no_bases() -> None:
    """Where the unembedding starts at zero the first gradient of a hidden matrix is zero: it begins with the next."""
    weight, gradients = random_problem(5, 7)
    zeros = torch.zeros_like(weight)
    late, _ = soap_run(weight, [zeros, zeros])
    assert torch.equal(late, weight)
    late, _ = soap_run(weight, [zeros, zeros, *gradients])
    assert torch.equal(late, soap_run(weight, gradients)[0])


def test_soap_does_not_see_the_coordinates() -> None:
    """Rotate the rows and columns of weights and gradients: the result rotates along. Adam's would not."""
    weight, gradients = random_problem(5, 5)
    u, v = (torch.linalg.qr(matrix)[0] for matrix in random_problem(5, 5, steps=2)[1])
    found, _ = soap_run(weight, gradients)
    rotated, _ = soap_run(u @ weight @ v.T, [u @ gradient @ v.T for gradient in gradients])
    torch.testing.assert_close(rotated, u @ found @ v.T, rtol=1e-7, atol=1e-9)


def test_soap_without_preconditioners_is_adamw_from_the_second_gradient_on() -> None:
    weight, gradients = random_problem(5, 7)
    found, optimizer = soap_run(weight, gradients, max_precondition_dim=4)
    (state,) = optimizer.state.values()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    parameter = nn.Parameter(weight.clone())
    adamw = torch.optim.AdamW([parameter], lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    for gradient in gradients[1:]:
        parameter.grad = gradient.clone()
        adamw.step()
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-14)


def test_blocks_are_matrices_of_their_own() -> None:
    """A matrix of 6 x 9 in blocks of 3 x 3, each as if it were alone; the longest block divides a side."""
    weight, gradients = random_problem(6, 9)
    found, optimizer = soap_run(weight, gradients, precondition_block=4)
    for row, column in product(range(0, 6, 3), range(0, 9, 3)):
        here = slice(row, row + 3), slice(column, column + 3)
        alone, _ = soap_run(weight[here], [gradient[here] for gradient in gradients])
        torch.testing.assert_close(found[here], alone, rtol=1e-9, atol=1e-11)
    (state,) = optimizer.state.values()
    assert state["basis_0"].shape == (6, 3, 3)


def test_a_side_that_is_too_long_has_no_preconditioner() -> None:
    weight, gradients = random_problem(5, 7)
    _, optimizer = soap_run(weight, gradients, max_precondition_dim=5)
    (state,) = optimizer.state.values()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "covariance_0", "basis_0"}
    assert state["covariance_0"].shape == (5, 5)
