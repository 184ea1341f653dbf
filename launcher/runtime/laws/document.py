"""Write a fitted law, its uncertainty and its consequences as law.json, and read it back.

form, constants                    which form, and its constants
source, training                   what it was fitted to: files, points, runs, ranges of N and D, widths (bits of
                                   weights, activations and KV cache of the points that were trained below 16)
bands                              middle 95 % of each constant over bootstrapped fits
fit, fit_post, held_out            points, R^2, mean absolute error in nats: of losses, of the deltas of quantization
                                   after training, of points that the fit did not see
warnings, undetermined             what the points could not tell; constants that they leave open
derived, curves                    what follows, null where it would stand on such constants; f_x(P) with its band
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from plumbline.data.damage import read_object, reading
from plumbline.launcher.runtime.laws.rows import Rows
from plumbline.model.scaling_laws.derived import (
    allocate,
    allocate_with_precision,
    critical_tokens,
    open_questions,
    optimal_precision,
)
from plumbline.model.scaling_laws.fit import BAND, Fit, bands, score
from plumbline.model.scaling_laws.forms import form_named, name_of
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import TRAINING, Floats, Points
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.published import PUBLISHED, SourcedLaw, published

CURVE_POINTS = 60
POST_BITS = (3, 4, 5, 6, 8)
SEVERAL = 0.05
"""Share of bootstrapped fits without an optimal width above which it has no band: what a band of 95 % leaves out."""


def describe(rows: Rows, fit: Fit, resampled: Sequence[Law], hold_out: str | None) -> dict[str, Any]:
    """Return everything about a fit, as plain values."""
    law, train, held = fit.law, fit.train, fit.held_out
    runs, low = len(np.unique(train.runs)), train.at[train.at.quantized]
    paired, deltas = train.post_deltas()
    return {
        "form": name_of(law),
        "constants": law.constants,
        "source": f"fitted to {len(train.at)} points of {runs} runs ({', '.join(map(str, rows.files))})",
        "training": {
            "files": [str(file) for file in rows.files],
            "points": len(train.at),
            "runs": runs,
            "left_out": rows.left_out,
            "parameters": [float(train.at.parameters.min()), float(train.at.parameters.max())],
            "tokens": [float(train.at.tokens.min()), float(train.at.tokens.max())],
            "widths": sorted({*zip(*(getattr(low, column).tolist() for column in TRAINING.values()), strict=True)}),
        },
        "bands": {name: list(band) for name, band in bands(resampled).items()},
        "bootstrap": len(resampled),
        "fit": asdict(score(law.loss(train.at), train.loss)),
        "fit_post": asdict(score(law.post_delta(paired.at), deltas)) if len(deltas) else None,
        "held_out": {"how": hold_out, **asdict(score(law.loss(held.at), held.loss))} if len(held.at) else None,
        "warnings": [*_several_settings(rows), *fit.warnings, *open_questions(law, fit.undetermined).values()],
        "undetermined": sorted(fit.undetermined),
        "derived": derive(fit, resampled),
        "curves": curves(fit, resampled),
    }


def _several_settings(rows: Rows) -> Iterator[str]:
    """Yield warnings if the points differ in more than what one law describes."""
    if rows.mixed:
        yield (
            f"at {rows.mixed} of the (N, D, bits) points differ in learning rate, labels or way of rounding: one law "
            "is fitted to all, good settings and bad; give the rows of the best setting of each, and of one way"
        )


def derive(fit: Fit, resampled: Sequence[Law]) -> dict[str, Any]:
    """Return the law's consequences at the points' largest compute C = (6/16) N D P, with P the bits of the weights."""
    law, at = fit.law, fit.train.at
    flops = float((6 / 16 * at.parameters * at.tokens * at.weight_bits).max())
    derived: dict[str, Any] = {"flops": flops}
    unanswered = open_questions(law, fit.undetermined)
    splits = law.A > 0 and law.B > 0 and "split" not in unanswered
    derived["at_16_bits"] = asdict(allocate(law, flops)) if splits else None
    if not isinstance(law, PrecisionLaw):
        return derived
    best = derived["optimal_bits"] = None if "precision" in unanswered else _or_none(optimal_precision, law)
    if best is not None:
        derived["at_optimal_bits"] = asdict(allocate_with_precision(law, flops)) if splits else None
        others = [_or_none(optimal_precision, other) for other in resampled if isinstance(other, PrecisionLaw)]
        known = [bits for bits in others if bits is not None]
        missing = derived["no_optimal_bits"] = others.count(None) / max(1, len(others))
        # A band of the draws that have an optimum would leave out the ends where there is none
        derived["optimal_bits_band"] = list(np.percentile(known, BAND)) if known and missing <= SEVERAL else None
    if "C_T" in law.constants:
        derived["critical_tokens_per_parameter"] = None if "critical" in unanswered else _critical(law, at)
    return derived


def _critical(law: PrecisionLaw, at: Points) -> dict[str, Any]:
    """Return D_crit over N by post_bits, for the largest model of the points."""
    size = float(at.parameters.max())
    return {"parameters": size, "post_bits": {str(bits): critical_tokens(law, size, bits) / size for bits in POST_BITS}}


def _or_none(question: Callable[[PrecisionLaw], float], law: PrecisionLaw) -> float | None:
    """Return the answer, or None if this law has none."""
    try:
        return question(law)
    except ValueError:
        return None


def curves(fit: Fit, resampled: Sequence[Law]) -> dict[str, dict[str, list[float]]]:
    """Return f_x(P) from the narrowest width of the points to 16 bits, with the band of the resampled laws."""
    if not isinstance(fit.law, PrecisionLaw):
        return {}
    curves = {}
    for index in fit.law.indices:
        bits = np.linspace(getattr(fit.train.at, TRAINING[index]).min(), 16.0, CURVE_POINTS)
        lines = [law.fraction(index, bits) for law in resampled if isinstance(law, PrecisionLaw)]
        band: Floats = np.percentile(lines, BAND, axis=0) if lines else np.empty((0, 0))
        curves[index] = {"bits": bits.tolist(), "f": fit.law.fraction(index, bits).tolist()}
        curves[index] |= {name: edge.tolist() for name, edge in zip(("low", "high"), band, strict=False)}
    return curves


def open_law(name: str) -> SourcedLaw:
    """Return a published law by its name, or the one in a law.json.

    Raises:
        ValueError: neither, or the file is not a law.
    """
    path = Path(name)
    if name in PUBLISHED or not (path.suffix or path.exists()):
        return published(name)
    if not path.is_file():
        raise ValueError(f"law {name}: no such file; give one that launcher/fit.py wrote, or {', '.join(PUBLISHED)}")
    with reading(path, "give a law.json of launcher/fit.py"):
        document = read_object(path)
        form = form_named(document["form"])
        law = form(**{name: float(value) for name, value in document["constants"].items()})
        training = document["training"]
        ranges = tuple(training["parameters"]), tuple(training["tokens"])
        source = f"{path}, {document['source']}"
        open_constants, warnings = frozenset(map(str, document["undetermined"])), tuple(map(str, document["warnings"]))
        widths = frozenset(tuple(map(float, each)) for each in training.get("widths", ()))
        return SourcedLaw(law, source, *ranges, undetermined=open_constants, warnings=warnings, widths=widths)
