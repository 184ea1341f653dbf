"""Derive consequences of a law: how much data is too much, which precision to train in, how to spend compute.

The cost of training is C = (6/16) N D P (arXiv 2411.04330), which is 6 N D at 16 bits. We do not use two formulas as
printed in that paper: eq. 12 lacks a beta, and eq. 6 and 17 disagree. Both are derived here from eq. 13 and 16.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import BF16, points
from plumbline.model.scaling_laws.precision import PrecisionLaw

MOST_BITS = 64.0
STEP = 1e-4  # bits, for numerical derivatives
CRITICAL = ("B", "beta", "C_T", "gamma_D", "gamma_N", "gamma_post")
TOLERANCES = ("C_w", "C_a", "C_kv")  # D_crit depends on those that a law has
SPLIT = ("A", "alpha", "B", "beta")
SHAPES = ("gamma_w", "zero_w", "gamma_a", "zero_a", "gamma_kv", "zero_kv")  # constants of f as they are searched for


@dataclass(frozen=True)
class Allocation:
    """Hold one way to spend compute, and the resulting loss."""

    parameters: float
    tokens: float
    bits: float
    loss: float


def open_questions(law: Law, undetermined: Collection[str]) -> dict[str, str]:
    """Return which questions a fitted law cannot answer, and why.

    They are "split" (best N and D), "precision" (best bits of training) and "critical" (D_crit).

    Args:
        law: the fitted law.
        undetermined: constants that its points do not determine.
    """
    questions: dict[str, tuple[str, tuple[str, ...]]] = {"split": ("the best N and D", SPLIT)}
    if isinstance(law, PrecisionLaw):
        questions["precision"] = ("the best precision", SHAPES)
    if isinstance(law, PrecisionLaw) and "C_T" in law.constants:
        questions["critical"] = ("D_crit", (*CRITICAL, *TOLERANCES))
    if law.TIED and "alpha" in undetermined:
        undetermined = {*undetermined, "beta"}
    missing = {key: [name for name in needed if name in undetermined] for key, (_, needed) in questions.items()}
    return {
        key: f"{questions[key][0]}: not stated, for the points do not determine {', '.join(names)}"
        for key, names in missing.items()
        if names
    }


def critical_tokens(law: PrecisionLaw, parameters: float, post_bits: float) -> float:
    """Return D_crit in tokens, or inf: beyond it, more data makes a bf16 model rounded to `post_bits` worse.

    It is the D of least loss, where beta B D^-beta = gamma_D delta_PTQ. Eq. 13 is the special case of a 16-bit model
    without any C_x and with N_eff = N; here both enter as in the loss.

    Raises:
        ValueError: the law has no quantization after training.
    """
    law.require(*CRITICAL)
    delta = float(law.post_delta(points(parameters, 1.0, post_bits=post_bits)))  # delta_PTQ / D^gamma_D
    gain, harm = law.beta * law.B, law.gamma_D * delta
    if harm <= 0:
        return float("inf")
    if gain <= 0:
        return 0.0
    with np.errstate(over="ignore"):  # two small exponents put it beyond any number of tokens
        return float(np.exp((np.log(gain) - np.log(harm)) / (law.gamma_D + law.beta)))


def optimal_precision(law: PrecisionLaw) -> float:
    """Return the bits to train in if N, D and P are all free: d ln f / d ln P = 1 for any compute (eq. 26, 27).

    The loss of the best split of compute decreases with f(P) / P, which this maximises.

    Raises:
        ValueError: the law has no f, or fewer bits are always better under it.
    """
    threshold = law.threshold

    def excess(bits: float) -> float:
        step = STEP * bits
        rise = np.log(law.efficiency(bits + step) / law.efficiency(bits - step))
        return float(rise / np.log((bits + step) / (bits - step))) - 1

    grid = threshold + np.geomspace(1e-2, MOST_BITS, 400)
    slopes = np.array([excess(bits) for bits in grid])
    falls = np.flatnonzero((slopes[:-1] > 0) & (slopes[1:] <= 0))
    if not falls.size:
        raise ValueError("f(P) / P has no maximum under this law: fewer bits are always better; check its gammas")
    best = falls[-1]
    return float(brentq(excess, grid[best], grid[best + 1]))


def allocate(law: Law, flops: float, bits: float = BF16) -> Allocation:
    """Return the best N and D for C = (6/16) N D P if everything that has an f is trained in P = `bits`.

    From eq. 16: N = (alpha A / beta B)^s f^(-alpha s) (N D)^(beta s) with s = 1 / (alpha + beta), and D from the cost.

    Raises:
        ValueError: the law lacks the constants, or has no best split.
    """
    law.require("A", "alpha", "B", "beta", "E")
    for name in SPLIT:
        if (value := getattr(law, name)) <= 0:
            raise ValueError(
                f"{name} = {value:g}: under this law one of size and data does not help, and no split is best; give a "
                "law in which it is above 0"
            )
    product = flops * BF16 / (6 * bits)  # N D
    share = 1 / (law.alpha + law.beta)
    ratio = law.alpha * law.A / (law.beta * law.B)
    parameters = float(ratio**share * law.efficiency(bits) ** (-law.alpha * share) * product ** (law.beta * share))
    tokens = product / parameters
    return Allocation(parameters, tokens, bits, _loss(law, parameters, tokens, bits))


def allocate_with_precision(law: PrecisionLaw, flops: float) -> Allocation:
    """Return the best N, D and P; P is computed first, since it does not depend on compute."""
    return allocate(law, flops, optimal_precision(law))


def precision_at_size(law: PrecisionLaw, parameters: float, flops: float) -> Allocation:
    """Return the best P, and D with it, for a model of a given size; P grows as log C.

    Raises:
        ValueError: the law has no f, or no optimal P between its zero and MOST_BITS.
    """
    law.require("A", "alpha", "B", "beta", "E")

    def loss(bits: float) -> float:
        return _loss(law, parameters, flops * BF16 / (6 * bits * parameters), bits)

    bounds = (law.threshold + 1e-3, MOST_BITS)
    bits = float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x)
    end = min(bounds, key=loss)
    if loss(end) <= loss(bits):  # the search stopped at a bound
        raise ValueError(
            f"at {parameters:.3g} parameters no precision is best: under this law the loss falls up to a bound of the "
            f"search, {end:.3g} bits; check its gammas"
        )
    return Allocation(parameters, flops * BF16 / (6 * bits * parameters), bits, loss(bits))


def _loss(law: Law, parameters: float, tokens: float, bits: float) -> float:
    return float(law.loss(law.at_bits(parameters, tokens, bits)))
