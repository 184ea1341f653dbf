"""Round to b-bit number formats: integers of 2 to 16 bits, or floats with any exponent and mantissa.

Formats have no scales; `quantizer.py` adds them.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Integer:
    """Round to whole numbers of `bits` bits, from -2^(bits - 1) to 2^(bits - 1) - 1."""

    bits: int

    @property
    def largest(self) -> float:
        """Return the value furthest above zero."""
        return float(2 ** (self.bits - 1) - 1)

    @property
    def smallest(self) -> float:
        """Return the value furthest below zero."""
        return -self.largest - 1

    def round(self, x: Tensor) -> Tensor:
        """Return the nearest values of the format, ties to even, saturating; x in fp32, any shape."""
        return x.round().clamp(self.smallest, self.largest)


@dataclass(frozen=True)
class Float:
    """Round to floats of a sign, `exponent_bits` and `mantissa_bits`, with subnormals.

    Every code is a number, as in the element formats of the OCP microscaling specification, except in E4M3, whose last
    code is NaN, and in formats with five or more exponent bits, whose last exponent is infinity, as in E5M2.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        """Return the bits of one value."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def largest_exponent(self) -> int:
        """Return the exponent of the largest value."""
        return (1 << (self.exponent_bits - 1)) - (self.exponent_bits >= 5)

    @property
    def largest(self) -> float:
        """Return the largest value: 448 for E4M3, 57344 for E5M2, 6 for E2M1."""
        last_step: float = 2.0**-self.mantissa_bits * (2 if (self.exponent_bits, self.mantissa_bits) == (4, 3) else 1)
        return float(2.0**self.largest_exponent * (2.0 - last_step))

    @property
    def smallest(self) -> float:
        """Return the value furthest below zero."""
        return -self.largest

    def round(self, x: Tensor) -> Tensor:
        """Return the nearest values of the format, ties to even, saturating; x in fp32, any shape."""
        x = x.clamp(self.smallest, self.largest)
        exponent = torch.frexp(x).exponent - 1  # |x| = 1.m x 2^exponent; frexp's mantissa is in [1/2, 1)
        smallest_normal = 2 - 2 ** (self.exponent_bits - 1)
        steps = exponent.clamp_min(smallest_normal) - self.mantissa_bits
        # In two halves: with 8 exponent bits a single power of two may exceed fp32
        half = steps // 2
        rounded = (x * power_of_two(-half) * power_of_two(half - steps)).round()
        return rounded * power_of_two(half) * power_of_two(steps - half)


Format = Integer | Float


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32 for int32 exponents from -126 to 127, of any shape.

    It is built from bits and so exact on every device; torch's `ldexp` multiplies by a power that a GPU may round.
    """
    return ((exponent + 127) << 23).view(torch.float32)


def parse_format(name: str) -> Format:
    """Return the format of a name: int2 to int16, or eXmY with 2 <= X <= 8, 0 <= Y <= 10, such as e4m3.

    Raises:
        ValueError: there is no format of that name.
    """
    if match := re.fullmatch(r"int(\d{1,2})", name):
        if 2 <= (bits := int(match[1])) <= 16:
            return Integer(bits)
    elif match := re.fullmatch(r"e(\d)m(\d{1,2})", name):
        exponent_bits, mantissa_bits = int(match[1]), int(match[2])
        if 2 <= exponent_bits <= 8 and mantissa_bits <= 10:
            return Float(exponent_bits, mantissa_bits)
    raise ValueError(f"{name!r} is no number format: give int2 to int16, or a float such as e4m3, e5m2, e2m1")
