"""Hold the inputs of a law, sizes, tokens and bit widths, as columns."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
BF16 = 16.0
"""Bits of unquantized values. The law's authors count bf16 as 16 bits like any other width."""
TRAINING = {"w": "weight_bits", "a": "activation_bits", "kv": "kv_bits"}
"""Index of a constant (gamma_w) -> its column."""


@dataclass(frozen=True)
class Points:
    """Hold models, one per entry; all columns have the same shape, and `points` builds them.

    parameters                            N, without embedding and head
    tokens                                D, of training
    weight_bits, activation_bits, kv_bits of training; 16: bf16, inf: exact arithmetic
    post_bits                             of the weights after training; inf: left as trained
    group_size                            values that share a scale; nan: none is known
    exponent_bits, mantissa_bits          of a float format; nan: not one
    """

    parameters: Floats
    tokens: Floats
    weight_bits: Floats
    activation_bits: Floats
    kv_bits: Floats
    post_bits: Floats
    group_size: Floats
    exponent_bits: Floats
    mantissa_bits: Floats

    def __len__(self) -> int:
        return self.parameters.size

    def __getitem__(self, index: NDArray[np.bool_] | NDArray[np.intp]) -> "Points":
        """Select some of the entries."""
        return Points(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def quantized(self) -> NDArray[np.bool_]:
        """Return which entries were trained with any width below 16 bits."""
        return (self.weight_bits < BF16) | (self.activation_bits < BF16) | (self.kv_bits < BF16)


def points(
    parameters: ArrayLike,
    tokens: ArrayLike,
    weight_bits: ArrayLike = BF16,
    activation_bits: ArrayLike = BF16,
    kv_bits: ArrayLike = BF16,
    post_bits: ArrayLike = np.inf,
    group_size: ArrayLike = np.nan,
    exponent_bits: ArrayLike = np.nan,
    mantissa_bits: ArrayLike = np.nan,
) -> Points:
    """Build columns from numbers and arrays of any shapes that broadcast.

    Raises:
        ValueError: a size, a number of tokens or a width is not positive.
    """
    given = (
        *(parameters, tokens, weight_bits, activation_bits, kv_bits, post_bits),
        *(group_size, exponent_bits, mantissa_bits),
    )
    columns = np.broadcast_arrays(*(np.asarray(column, np.float64) for column in given))
    for field, column in zip(fields(Points), columns, strict=True):
        if (column < 0).any() or (field.name not in ("exponent_bits", "mantissa_bits") and (column == 0).any()):
            raise ValueError(f"{field.name} = {column.min():g}: must be positive")
    return Points(*columns)
