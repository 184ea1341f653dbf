"""Compute the cost of low precision in training and of rounding afterwards (Kumar et al., arXiv 2411.04330).

    N_eff     = N f_w(P_w) f_a(P_a) f_kv(P_kv)                    f_x(P) = 1 - exp(-P / gamma_x + n_x)      (eq. 3, 4)
    delta_PTQ = C_T D^gamma_D / N_eff^gamma_N exp(-P_post / gamma_post + b)
                x prod_x [1 - exp(-C_x (P_x - P_post))]                                                  (eq. 2, 9, 11)
    L         = A N_eff^-alpha + B D^-beta + E + delta_PTQ

The offsets n_x and b are from the paper's appendix K. Its main text drops them, and the appendix leaves their sign
open; only with this sign do the published constants give the 7 to 8 bits that the paper finds optimal.

P_post is the bits of weights. Weights that were trained in as few stay as they are, so delta_PTQ is 0. Where only the
inputs or the keys and values were trained in as few, a factor of the product is not positive: the law says nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from plumbline.model.scaling_laws.law import Law, Range
from plumbline.model.scaling_laws.points import BF16, TRAINING, Floats, Points, points

MARGIN = 0.05  # bits by which a fitted f stays above zero at the narrowest width of the points


@dataclass(frozen=True, kw_only=True)
class PrecisionLaw(Law):
    """Compute the loss by the formulas of this module.

    An x without gamma_x has no f; without C_T there is no quantization after training.

    C_x is not needed for a model trained at 16 bits, as in eq. 2: there its factor is 1.
    """

    TITLE: ClassVar[str] = "N_eff with 1 - exp(-P / gamma + n), and an exponential in P_post (arXiv 2411.04330)"
    LINEAR: ClassVar[tuple[str, ...]] = ("A", "B", "E", "C_T")
    USES: ClassVar[tuple[str, ...]] = (*TRAINING.values(), "post_bits")
    TIED: ClassVar[bool] = True

    gamma_w: float = np.nan
    n_w: float = 0.0
    gamma_a: float = np.nan
    n_a: float = 0.0
    gamma_kv: float = np.nan
    n_kv: float = 0.0
    C_T: float = np.nan
    gamma_D: float = np.nan
    gamma_N: float = np.nan
    gamma_post: float = np.nan
    b: float = 0.0
    C_w: float = np.nan
    C_a: float = np.nan
    C_kv: float = np.nan

    def terms(self, at: Points) -> tuple[Floats, ...]:
        """Return N_eff^-alpha, D^-beta, 1, and delta_PTQ / C_T."""
        self.require("alpha", "beta")
        effective = at.parameters * self.kept(at)
        return effective**-self.alpha, at.tokens**-self.beta, np.ones(effective.shape), self._damage(at, effective)

    def kept(self, at: Points) -> Floats:
        """Return N_eff / N: the product of the three f."""
        product = np.ones(at.parameters.shape)
        for index, column in TRAINING.items():
            product = product * self.fraction(index, getattr(at, column))
        return product

    def fraction(self, index: str, bits: Floats) -> Floats:
        """Return f_x(P) for x = "w", "a" or "kv".

        Raises:
            ValueError: f is not known, or not positive at the narrowest of `bits`.
        """
        gamma, offset = getattr(self, f"gamma_{index}"), getattr(self, f"n_{index}")
        narrowest = bits.min(initial=np.inf)
        if np.isnan(gamma):
            if narrowest < BF16:
                raise ValueError(
                    f"{TRAINING[index]} = {narrowest:g}: this law has no f_{index} (gamma_{index} is not known); "
                    f"fit one to runs with several {TRAINING[index]}"
                )
            return np.ones(bits.shape)
        fraction: Floats = 1 - np.exp(-bits / gamma + offset)
        if narrowest <= gamma * offset:
            raise ValueError(
                f"{TRAINING[index]} = {narrowest:g}: f_{index} is not positive at or below gamma_{index} x n_{index} = "
                f"{gamma * offset:.3g} bits, where the law says nothing; take more bits"
            )
        return fraction

    def at_bits(self, parameters: ArrayLike, tokens: ArrayLike, bits: ArrayLike) -> Points:
        """Return models trained with `bits` for each x in `indices`, and in bf16 elsewhere."""
        return points(parameters, tokens, *(bits if index in self.indices else BF16 for index in TRAINING))

    def efficiency(self, bits: float) -> float:
        """Return the product of the law's f, each at `bits`."""
        return float(self.kept(self.at_bits(1.0, 1.0, bits)))

    @property
    def indices(self) -> tuple[str, ...]:
        """Return the x that have an f."""
        return tuple(index for index in TRAINING if not np.isnan(getattr(self, f"gamma_{index}")))

    @property
    def threshold(self) -> float:
        """Return the bits at or below which some f is not positive, or 0 if there are none.

        Raises:
            ValueError: the law has no f.
        """
        if not self.indices:
            raise ValueError("gamma_w, gamma_a, gamma_kv: this law knows no training precision; fit one to such runs")
        zeros: list[float] = [getattr(self, f"gamma_{index}") * getattr(self, f"n_{index}") for index in self.indices]
        return max(0.0, *zeros)

    def _damage(self, at: Points, effective: Floats) -> Floats:
        """Return delta_PTQ / C_T."""
        rounded = np.isfinite(at.post_bits) & (at.weight_bits > at.post_bits)
        if not rounded.any():
            return np.zeros(effective.shape)
        self.require("gamma_D", "gamma_N", "gamma_post")
        bits = np.where(rounded, at.post_bits, 0.0)
        size = at.tokens**self.gamma_D / effective**self.gamma_N
        damage = size * np.exp(-bits / self.gamma_post + self.b)
        for index, column in TRAINING.items():
            damage = damage * self._tolerance(index, np.where(rounded, getattr(at, column), np.inf), bits)
        return np.where(rounded, damage, 0.0)

    def _tolerance(self, index: str, width: Floats, bits: Floats) -> Floats:
        """Return 1 - exp(-C_x (P_x - P_post)): a model trained at P_x bits has learned to tolerate noise.

        Raises:
            ValueError: a model was trained at P_post bits or fewer, or at fewer than 16 where C_x is not known.
        """
        if (width <= bits).any():
            raise ValueError(
                f"{TRAINING[index]} = {width[width <= bits].min():g}: the law says nothing about weights that are then "
                "rounded to as many bits or more; take fewer post_bits"
            )
        rate = getattr(self, f"C_{index}")
        if not np.isnan(rate):
            return 1 - np.exp(-rate * (width - bits))  # type: ignore[no-any-return]
        if (width < BF16).any():
            raise ValueError(
                f"C_{index}: not known in this law, and needed for a model trained with {TRAINING[index]} = "
                f"{width.min():g} and then rounded to fewer bits; fit or give it"
            )
        return np.ones(width.shape)

    @classmethod
    def search(cls, at: Points) -> dict[str, Range]:
        """Return the ranges of the constants that these points can determine.

        An f is searched as gamma_x and its zero gamma_x n_x, which stays below all widths.
        """
        ranges = super().search(at)
        rounded = np.isfinite(at.post_bits)
        for index, column in TRAINING.items():
            widths = np.unique(getattr(at, column))
            if len(widths) == 1 and widths[0] < BF16:
                raise ValueError(
                    f"{column} is {widths[0]:g} in all points: what that costs cannot be told from A; "
                    f"add runs at {BF16:g} bits"
                )
            if len(widths) > 1:
                ranges[f"gamma_{index}"] = Range(0.05, 20.0, 0.5, 4.0)
            if len(widths) > 2:
                highest = float(widths[0]) - MARGIN
                ranges[f"zero_{index}"] = Range(-20.0, highest, min(0.0, highest - 1), highest - 0.3)
        if rounded.any():
            exponent = Range(0.0, 2.0, 0.1, 0.8)
            ranges |= {"gamma_D": exponent, "gamma_N": exponent, "gamma_post": Range(0.05, 20.0, 0.3, 3.0)}
        for index, column in TRAINING.items():
            width = getattr(at, column)
            if (rounded & (width < BF16) & (width > at.post_bits)).any():
                ranges[f"C_{index}"] = Range(1e-3, 20.0, 0.1, 2.0)
        return ranges

    @classmethod
    def build(cls, constants: Mapping[str, float]) -> Law:
        """Build a law, with n_x from the zero; b stays 0, since C_T exp(b) is one number, which a fit calls C_T."""
        values = {name: value for name, value in constants.items() if not name.startswith("zero_")}
        for index in TRAINING:
            if f"zero_{index}" in constants:
                values[f"n_{index}"] = constants[f"zero_{index}"] / constants[f"gamma_{index}"]
        return super().build(values)

    @classmethod
    def cautions(cls, at: Points) -> list[str]:
        """Return the cautions of `Law`, and those about widths."""
        notes = super().cautions(at)
        for index, column in TRAINING.items():
            widths = np.unique(getattr(at, column))
            if len(widths) == 1:
                notes.append(f"{column} is {widths[0]:g} in all points: there is no f_{index} in the law")
            elif len(widths) == 2:
                notes.append(f"{column} has two values only: n_{index} cannot be told from gamma_{index}, taken as 0")
        after = np.unique(at.post_bits[np.isfinite(at.post_bits)])
        if len(after) == 1:
            notes.append(f"post_bits has one value only ({after[0]:g}): gamma_post cannot be told from C_T")
        return notes
