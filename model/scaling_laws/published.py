"""List published constants with their sources. They hold for the data and models to which they were fitted."""

from dataclasses import dataclass, replace

from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.variants import GranularityLaw, PowerLaw


@dataclass(frozen=True)
class SourcedLaw:
    """Hold a law and the source of its constants."""

    law: Law
    source: str
    parameters: tuple[float, float]
    """Smallest and largest N of the fit."""
    tokens: tuple[float, float]
    """Smallest and largest D of the fit, or nan if our source does not say."""
    missing: str = ""
    """What was not reported; answers that need it are refused."""
    undetermined: frozenset[str] = frozenset()
    """Constants that the fitted points do not determine; D_crit is not given if it depends on one."""
    warnings: tuple[str, ...] = ()
    """What the fitted points could not determine, in words."""
    widths: frozenset[tuple[float, ...]] = frozenset()
    """Bits of weights, activations and KV cache of the points that were trained below 16; empty if not known."""
    counts_embedding: bool = False
    """Whether its N includes embedding and unembedding."""


UNKNOWN = (float("nan"), float("nan"))

# arXiv 2411.04330, table 2 (which calls the index of activations i). alpha = beta is tied there
KUMAR = PrecisionLaw(
    A=4.299e3,
    alpha=0.4965,
    B=1.806e4,
    beta=0.4965,
    E=2.7648,
    gamma_w=2.6745,
    n_w=0.3037,
    gamma_a=2.2102,
    n_a=1.4072,
    gamma_kv=0.9578,
    n_kv=2.4185,
    C_T=0.0598,
    gamma_D=0.5068,
    gamma_N=0.3439,
    gamma_post=0.5907,
    b=1.1277,
)
KUMAR_RANGE = ((30e6, 220e6), (1.5e9, 26e9))
NO_ROBUSTNESS = "C_w, C_a, C_kv (rounding a model that was trained in low precision)"
NO_BASE = "A, B, E and their exponents (only the difference to high precision can be computed)"


def _chen(k: float, gamma_n: float, gamma_d: float, gamma_g: float) -> SourcedLaw:
    law = GranularityLaw(alpha=0.3022, beta=0.3022, k=k, gamma_N=gamma_n, gamma_D=gamma_d, gamma_G=gamma_g)
    return SourcedLaw(law, "Chen et al., arXiv 2505.14302", (74e6, 595e6), (10e9, 200e9), "A, B, E")


PUBLISHED: dict[str, SourcedLaw] = {
    "kumar2411": SourcedLaw(KUMAR, "Kumar et al., arXiv 2411.04330, table 2", *KUMAR_RANGE, NO_ROBUSTNESS),
    "kumar2411-float": SourcedLaw(
        replace(KUMAR, gamma_w=2.8111, n_w=0.1240),
        "Kumar et al., arXiv 2411.04330, weights in float formats",
        *KUMAR_RANGE,
        NO_ROBUSTNESS,
    ),
    "besiroglu2404": SourcedLaw(
        Law(A=482.01, alpha=0.3478, B=2085.43, beta=0.3658, E=1.8172),
        "Besiroglu et al., arXiv 2404.10102, Hoffmann's runs fitted again",
        UNKNOWN,
        UNKNOWN,
        counts_embedding=True,  # as Hoffmann's does (Pearce and Song, arXiv 2406.12907)
    ),
    "ouyang2411": SourcedLaw(
        PowerLaw(k=0.017, gamma_D=0.5251, gamma_N=0.2261, gamma_P=5.4967),
        "Ouyang et al., arXiv 2411.17691",
        (160e6, 12e9),
        UNKNOWN,
        NO_BASE,
    ),
    "chen2505-w4a4": _chen(0.1582, 0.2186, 0.0745, 0.7779),
    "chen2505-w4a16": _chen(0.2522, 0.3589, 0.1610, 0.3533),
    "chen2505-w16a4": _chen(0.1004, 0.1816, 0.0331, 0.9812),
    "chen2505-w4a4-fc2in8": _chen(0.3519, 0.2637, 0.0964, 0.3407),
}


def published(name: str) -> SourcedLaw:
    """Return a published law by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PUBLISHED:
        raise ValueError(f"law {name!r}: unknown; one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
