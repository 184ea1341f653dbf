"""Compute loss from parameters and tokens with the law that all others extend (Hoffmann et al., arXiv 2203.15556)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from plumbline.model.scaling_laws.points import BF16, Floats, Points, points


@dataclass(frozen=True)
class Range:
    """Bound the search for a constant, and give the narrower interval for starting points."""

    low: float
    high: float
    start_low: float
    start_high: float


@dataclass(frozen=True, kw_only=True)
class Law:
    """Compute L(N, D) = A N^-alpha + B D^-beta + E, in nats per token; unknown constants are nan.

    Every form is linear in the constants `LINEAR` once the others are given, which fits exploit.
    """

    TITLE: ClassVar[str] = "Chinchilla: A N^-alpha + B D^-beta + E (arXiv 2203.15556)"
    LINEAR: ClassVar[tuple[str, ...]] = ("A", "B", "E")
    USES: ClassVar[tuple[str, ...]] = ()
    """Columns that matter besides parameters and tokens."""
    TIED: ClassVar[bool] = False
    """Whether a fit keeps beta = alpha."""
    ONE_FORMAT: ClassVar[bool] = False
    """Whether its constants belong to the bits of training to which they were fitted, and say nothing of others."""

    A: float = np.nan
    alpha: float = np.nan
    B: float = np.nan
    beta: float = np.nan
    E: float = np.nan

    def loss(self, at: Points) -> Floats:
        """Return nats per token, in the shape of `at`.

        Raises:
            ValueError: a required constant is unknown, or `at` is outside the form's domain.
        """
        self.require("alpha", "beta")
        return self._sum(self.terms(at))

    def post_delta(self, at: Points) -> Floats:
        """Return the nats that post-training quantization adds; needs only the constants of that term."""
        return self._sum(self._differences(at, replace(at, post_bits=np.full(at.post_bits.shape, np.inf))))

    def training_delta(self, at: Points) -> Floats:
        """Return by how many nats training in low precision is worse than in bf16.

        It needs only the constants that matter for the difference.
        """
        high, none = (np.full(at.parameters.shape, value) for value in (BF16, np.nan))
        plain = {"weight_bits": high, "activation_bits": high, "kv_bits": high}
        return self._sum(self._differences(at, replace(at, **plain, exponent_bits=none, mantissa_bits=none)))

    def _differences(self, at: Points, reference: Points) -> list[Floats]:
        """Return the differences of the terms, 0 where nothing changes or a term is unknown in both."""
        pairs = zip(self.terms(at), self.terms(reference), strict=True)
        return [np.where((here == there) | np.isnan(here), 0.0, here - there) for here, there in pairs]

    def _sum(self, terms: Sequence[Floats]) -> Floats:
        """Sum the terms times their constants; a constant is only required if its term is not 0."""
        total = np.zeros(terms[0].shape)
        for name, term in zip(self.LINEAR, terms, strict=True):
            if term.any():
                self.require(name)
                total = total + getattr(self, name) * term
        return total

    def terms(self, at: Points) -> tuple[Floats, ...]:
        """Return the factors of the constants `LINEAR`, in order."""
        return at.parameters**-self.alpha, at.tokens**-self.beta, np.ones(at.parameters.shape)

    def at_bits(self, parameters: ArrayLike, tokens: ArrayLike, bits: ArrayLike) -> Points:  # noqa: ARG002 knows none
        """Return models trained with `bits` wherever the law has an f, and in bf16 elsewhere."""
        return points(parameters, tokens)

    def efficiency(self, bits: float) -> float:  # noqa: ARG002 this form knows no bits
        """Return N_eff / N of a model trained with `bits` wherever the law has an f."""
        return 1.0

    def require(self, *names: str) -> None:
        """Refuse to answer if constants are unknown.

        Raises:
            ValueError: one of `names` is unknown.
        """
        unknown = [name for name in names if np.isnan(getattr(self, name))]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: not known in this law, and the answer depends on it; fit or give it"
            )

    @property
    def constants(self) -> dict[str, float]:
        """Return the known constants by name."""
        values = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        return {name: value for name, value in values.items() if not np.isnan(value)}

    @classmethod
    def search(cls, at: Points) -> dict[str, Range]:  # noqa: ARG003 these two do not depend on the points
        """Return the ranges of the constants, besides `LINEAR`, that a fit to these points searches for.

        Raises:
            ValueError: the points lack what the form needs.
        """
        exponent = Range(0.02, 2.0, 0.2, 0.7)
        return {"alpha": exponent} if cls.TIED else {"alpha": exponent, "beta": exponent}

    @classmethod
    def build(cls, constants: Mapping[str, float]) -> "Law":
        """Build a law from the constants of `search` and `LINEAR`; a tied beta is alpha unless given."""
        return cls(**{**({"beta": constants["alpha"]} if cls.TIED else {}), **constants})

    @classmethod
    def cautions(cls, at: Points) -> list[str]:
        """Return warnings about what these points cannot distinguish under this form."""
        notes = []
        for name, letter, constants in (("parameters", "N", "A, alpha"), ("tokens", "D", "B, beta")):
            values = np.unique(getattr(at, name))
            if len(values) == 1:
                notes.append(
                    f"{name} is {values[0]:g} in all points: {letter} does not vary, {constants} and E are mixed"
                )
        notes += [
            f"{name} varies, and this form does not know it"
            for name in ("weight_bits", "activation_bits", "kv_bits", "post_bits")
            if name not in cls.USES and len(np.unique(getattr(at, name))) > 1
        ]
        return notes
