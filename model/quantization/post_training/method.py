"""Define what every method of rounding weights states about itself, and the plain one: to the nearest value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from plumbline.model.quantization.quantizer import Grid, Quantizer


class MethodSettings(Protocol):
    """Hold what a recipe says to its method."""

    @property
    def act_order(self) -> bool:
        """Return whether columns with the largest inputs come first."""

    @property
    def damping(self) -> float:
        """Return what is added to the diagonal of the Hessian, as a share of its mean."""

    @property
    def block_size(self) -> int:
        """Return the number of columns between two updates of all later ones."""


Round = Callable[[Tensor, Tensor | None, Quantizer, MethodSettings], tuple[Tensor, Grid]]
InputScale = Callable[[Sequence[Tensor], Quantizer, Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class Method:
    """State how weights are rounded, and what that takes.

    Each method is one file of this folder and one line of `METHODS` (recipes.py).
    """

    round: Round
    """Rounds a weight [out, in], given the sum of x x^T over its inputs x, [in, in] (None if it needs no text), its
    quantizer and the recipe; returns values and the grid that they lie on."""
    needs_text: bool = False
    """Whether it needs calibration text, for the products of inputs."""
    orders_columns: bool = False
    """Whether act_order means anything to it."""
    input_scale: InputScale | None = None
    """Chooses what to divide the inputs by, [in], from the weights that share them, their quantizer, mean |x| and the
    products; None: it leaves them."""


def on_grid(weight: Tensor, grid: Grid, quantizer: Quantizer) -> tuple[Tensor, Grid]:
    """Return the nearest values of the grid, and the grid."""
    return grid.round(quantizer.blocked(weight, "weights")[0]).reshape(weight.shape), grid


def _round_to_nearest(
    weight: Tensor, _products: Tensor | None, quantizer: Quantizer, _settings: MethodSettings
) -> tuple[Tensor, Grid]:
    return on_grid(weight, quantizer.grid(weight, "weights"), quantizer)


RTN = Method(_round_to_nearest)
