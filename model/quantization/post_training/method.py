"""Define the interface of weight-rounding methods, and the plain method: rounding to nearest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from plumbline.model.quantization.quantizer import Grid, Quantizer


class MethodSettings(Protocol):
    """Define the settings that a recipe passes to its method."""

    @property
    def act_order(self) -> bool:
        """Return whether columns with the largest inputs are processed first."""

    @property
    def damping(self) -> float:
        """Return the damping of the Hessian's diagonal, as a share of its mean."""

    @property
    def block_size(self) -> int:
        """Return the number of columns between two updates of all later ones."""


Round = Callable[[Tensor, Tensor | None, Quantizer, MethodSettings], tuple[Tensor, Grid]]
InputScale = Callable[[Sequence[Tensor], Quantizer, Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class Method:
    """State how weights are rounded and what that needs.

    Each method is one file of this folder and one line of `METHODS` (recipes.py).
    """

    round: Round
    """Rounds a weight [out, in], given the sum of x x^T over its inputs x, [in, in] (None if it needs no text), its
    quantizer and the recipe; returns the values and their grid."""
    needs_text: bool = False
    """Whether it needs calibration text for the products of inputs."""
    orders_columns: bool = False
    """Whether it goes column by column, and so reads act_order, damping and block_size."""
    input_scale: InputScale | None = None
    """Chooses the divisor of the inputs, [in], from the weights that share them, their quantizer, mean |x| and the
    products; None leaves inputs unchanged."""


def on_grid(weight: Tensor, grid: Grid, quantizer: Quantizer) -> tuple[Tensor, Grid]:
    """Return the nearest values of the grid, and the grid."""
    return grid.round(quantizer.blocked(weight, "weights")[0]).reshape(weight.shape), grid


def _round_to_nearest(
    weight: Tensor, _products: Tensor | None, quantizer: Quantizer, _settings: MethodSettings
) -> tuple[Tensor, Grid]:
    return on_grid(weight, quantizer.grid(weight, "weights"), quantizer)


RTN = Method(_round_to_nearest)
