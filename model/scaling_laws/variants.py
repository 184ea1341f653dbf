"""Define other proposed forms for the cost of low precision, which can be fitted and compared."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from plumbline.model.scaling_laws.law import Law, Range
from plumbline.model.scaling_laws.points import TRAINING, Floats, Points


@dataclass(frozen=True, kw_only=True)
class PowerLaw(Law):
    """Model post-training quantization as a power of the width: delta = k D^gamma_D / (N^gamma_N P_post^gamma_P).

    Ouyang et al., arXiv 2411.17691, for models trained in high precision.
    """

    TITLE: ClassVar[str] = "a power of P_post (arXiv 2411.17691)"
    LINEAR: ClassVar[tuple[str, ...]] = ("A", "B", "E", "k")
    USES: ClassVar[tuple[str, ...]] = ("post_bits",)

    k: float = np.nan
    gamma_D: float = np.nan
    gamma_N: float = np.nan
    gamma_P: float = np.nan

    def terms(self, at: Points) -> tuple[Floats, ...]:
        """Return N^-alpha, D^-beta, 1, and delta / k."""
        return *super().terms(at), self._damage(at)

    def _damage(self, at: Points) -> Floats:
        rounded = np.isfinite(at.post_bits)
        if not rounded.any():
            return np.zeros(at.parameters.shape)
        self.require("gamma_D", "gamma_N", "gamma_P")
        bits = np.where(rounded, at.post_bits, 1.0)
        return np.where(rounded, at.tokens**self.gamma_D / (at.parameters**self.gamma_N * bits**self.gamma_P), 0.0)

    @classmethod
    def search(cls, at: Points) -> dict[str, Range]:
        """Return the ranges of the exponents."""
        if not np.isfinite(at.post_bits).any():
            raise ValueError("post_bits: no point was quantized after training, which this form is about")
        exponent = Range(0.0, 2.0, 0.1, 0.8)
        own = {"gamma_D": exponent, "gamma_N": exponent, "gamma_P": Range(0.1, 20.0, 2.0, 8.0)}
        return {**super().search(at), **own}


@dataclass(frozen=True, kw_only=True)
class GranularityLaw(Law):
    """Model training in one low-precision format by group size: delta = k D^gamma_D (log2 G)^gamma_G / N^gamma_N.

    Chen et al., arXiv 2505.14302. The constants belong to one choice of widths, such as W4A4; points of 16 bits have no
    delta.
    """

    TITLE: ClassVar[str] = "trained in one format, by group size (arXiv 2505.14302)"
    LINEAR: ClassVar[tuple[str, ...]] = ("A", "B", "E", "k")
    USES: ClassVar[tuple[str, ...]] = (*TRAINING.values(), "group_size")
    TIED: ClassVar[bool] = True
    ONE_FORMAT: ClassVar[bool] = True

    k: float = np.nan
    gamma_D: float = np.nan
    gamma_N: float = np.nan
    gamma_G: float = np.nan

    def terms(self, at: Points) -> tuple[Floats, ...]:
        """Return N^-alpha, D^-beta, 1, and delta / k."""
        return *super().terms(at), self._damage(at)

    def _damage(self, at: Points) -> Floats:
        quantized = at.quantized
        if not quantized.any():
            return np.zeros(at.parameters.shape)
        _need(at.group_size, quantized, "group_size")
        self.require("gamma_D", "gamma_N", "gamma_G")
        group = np.log2(np.where(quantized, at.group_size, 2.0))
        return np.where(quantized, at.tokens**self.gamma_D * group**self.gamma_G / at.parameters**self.gamma_N, 0.0)

    @classmethod
    def search(cls, at: Points) -> dict[str, Range]:
        """Return the ranges of the exponents."""
        if not at.quantized.any():
            raise ValueError("weight_bits, activation_bits, kv_bits: 16 in all points, and this form is about fewer")
        _need(at.group_size, at.quantized, "group_size")
        own = {"gamma_D": Range(0.0, 2.0, 0.01, 0.5), "gamma_N": Range(0.0, 2.0, 0.1, 0.5)}
        return {**super().search(at), **own, "gamma_G": Range(0.0, 3.0, 0.2, 1.2)}

    @classmethod
    def cautions(cls, at: Points) -> list[str]:
        """Return the cautions of `Law`, and those about formats."""
        notes = super().cautions(at)
        low = at[at.quantized]
        formats = set(zip(low.weight_bits, low.activation_bits, low.kv_bits, strict=True))
        if len(formats) > 1:
            notes.append(f"the points mix {len(formats)} choices of widths, and this form is about one at a time")
        if len(np.unique(low.group_size)) == 1:
            notes.append(f"group_size is {low.group_size[0]:g} in all points: gamma_G cannot be told from k")
        return notes


@dataclass(frozen=True, kw_only=True)
class FloatLaw(Law):
    """Model training in a float format of E exponent and M mantissa bits, with scales shared by groups of G.

    delta = k D^beta / N^alpha (log2 G)^gamma_G / ((E + 0.5)^delta_E (M + 0.5)^nu_M), after Sun et al., arXiv
    2501.02423. If all groups have one size, or there are none, k absorbs that factor. Points without a format have no
    delta.
    """

    TITLE: ClassVar[str] = "trained in a float format, by exponent and mantissa bits (arXiv 2501.02423)"
    LINEAR: ClassVar[tuple[str, ...]] = ("A", "B", "E", "k")
    USES: ClassVar[tuple[str, ...]] = (*TRAINING.values(), "group_size", "exponent_bits", "mantissa_bits")

    k: float = np.nan
    delta_E: float = np.nan
    nu_M: float = np.nan
    gamma_G: float = 0.0

    def terms(self, at: Points) -> tuple[Floats, ...]:
        """Return N^-alpha, D^-beta, 1, and delta / k."""
        formats = ~np.isnan(at.exponent_bits)
        _need(at.exponent_bits, at.quantized, "weight_format")
        damage = np.zeros(at.parameters.shape)
        if formats.any():
            self.require("delta_E", "nu_M")
            steps = (at.exponent_bits + 0.5) ** self.delta_E * (at.mantissa_bits + 0.5) ** self.nu_M
            group = np.where(np.isnan(at.group_size), 2.0, at.group_size)
            size = at.tokens**self.beta / at.parameters**self.alpha * np.log2(group) ** self.gamma_G
            damage = np.where(formats, size / steps, 0.0)
        return *super().terms(at), damage

    @classmethod
    def search(cls, at: Points) -> dict[str, Range]:
        """Return the ranges of the exponents."""
        formats = ~np.isnan(at.exponent_bits)
        if not formats.any():
            raise ValueError("weight_format: no point has one, and this form is about float formats")
        _need(at.exponent_bits, at.quantized, "weight_format")
        own = {"delta_E": Range(0.0, 10.0, 1.0, 5.0), "nu_M": Range(0.0, 10.0, 1.0, 5.0)}
        if len(np.unique(at.group_size[formats], equal_nan=True)) > 1:
            _need(at.group_size, formats, "group_size")
            own["gamma_G"] = Range(0.0, 3.0, 0.2, 1.2)
        return {**super().search(at), **own}

    @classmethod
    def cautions(cls, at: Points) -> list[str]:
        """Return the cautions of `Law`, and those about formats."""
        notes = super().cautions(at)
        for name, constant in (("exponent_bits", "delta_E"), ("mantissa_bits", "nu_M")):
            values = getattr(at, name)[~np.isnan(getattr(at, name))]
            if len(np.unique(values)) == 1:
                notes.append(f"{name} is {values[0]:g} in all formats: {constant} cannot be told from k")
        return notes


def _need(column: Floats, where: NDArray[np.bool_], name: str) -> None:
    """Refuse points that lack what a form needs."""
    missing = int((np.isnan(column) & where).sum())
    if missing:
        raise ValueError(f"{name}: missing in {missing} point(s) trained below 16 bits, and this form needs it there")
