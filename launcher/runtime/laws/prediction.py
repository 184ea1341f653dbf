"""Predict with a law the loss of a configuration, also at other widths, and better ways to spend its compute."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from plumbline.launcher.runtime.laws.document import POST_BITS, open_law
from plumbline.launcher.runtime.laws.rows import layout_of
from plumbline.launcher.runtime.system.files import finite
from plumbline.model.quantization.precision import PrecisionConfig
from plumbline.model.scaling_laws.derived import (
    Allocation,
    allocate,
    allocate_with_precision,
    critical_tokens,
    open_questions,
    precision_at_size,
)
from plumbline.model.scaling_laws.forms import name_of
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import BF16, TRAINING, Points, points
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.published import PUBLISHED, SourcedLaw

TRAINING_BITS = (4, 5, 6, 7, 8, 12, 16)
SHAPES = {"at_16_bits": "best split", "at_optimal_bits": "best precision", "at_this_size": "at this size"}


@dataclass(frozen=True)
class AtTrainingBits:
    """Hold the prediction for training everything in one width."""

    bits: int
    efficiency: float
    """Effective over real number of parameters, N_eff / N."""
    loss: float


@dataclass(frozen=True)
class AtPostBits:
    """Hold the cost of post-training quantization after training in bf16."""

    bits: float
    delta: float
    """Nats per token."""
    critical_tokens: float | None
    """Training tokens beyond which the rounded model gets worse, or inf, or None if the law or its points do not
    determine it."""


@dataclass(frozen=True)
class Prediction:
    """Hold a law's predictions for a configuration. Losses are in nats per token."""

    name: str
    """The law, as the user named it."""
    form: str
    source: str
    parameters: int
    """N, as the law counts it."""
    counts_embedding: bool
    """Whether embedding and head are in N."""
    tokens: int
    """D."""
    loss: float
    """Loss of training in bf16."""
    bits: dict[str, int]
    """weight_bits, activation_bits and kv_bits of training."""
    loss_at_bits: float | None
    """Loss of training in these widths, or None if the law does not cover one of them."""
    quantized: list[str]
    """The widths that the law covers."""
    training: list[AtTrainingBits]
    post: list[AtPostBits]
    flops: float
    """6 N D."""
    is_above_guessing: bool
    """Whether the loss exceeds ln(vocabulary size), so that the law does not apply at this size."""
    notes: list[str]
    """Sentences that a reader must know before believing a number."""
    allocations: dict[str, Allocation]
    """Better ways to spend the compute, for those of SHAPES with an optimum under the law."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with allocations at the top level and null for values that are not finite."""
        values = asdict(self)
        for point in values["post"]:
            if point["critical_tokens"] is None:
                del point["critical_tokens"]
        allocations = values.pop("allocations")
        plain: dict[str, Any] = finite({**values, **allocations})
        return plain


def predict(
    name: str, total: int, non_embedding: int, tokens: int, vocab_size: int, precision: PrecisionConfig
) -> Prediction:
    """Return every number of the prediction.

    Args:
        name: of a published law, or a law.json.
        total: parameters.
        non_embedding: those without embedding and head.
        tokens: D.
        vocab_size: token ids, one of which is guessed.
        precision: what is rounded in training.

    Raises:
        ValueError: there is no such law, or it lacks constants that the loss needs.
    """
    sourced = open_law(name)
    law = sourced.law
    _check_whole(law, name)
    parameters = total if sourced.counts_embedding else non_embedding
    flops = 6.0 * parameters * tokens
    loss = _loss(sourced, name, points(parameters, tokens))
    unanswered = open_questions(law, sourced.undetermined)
    notes = list(dict.fromkeys([*_notes(name, sourced, parameters, tokens), *unanswered.values()]))
    guessing = math.log(vocab_size)
    if loss > guessing:
        notes.append(
            f"the loss is above that of guessing, ln {vocab_size} = {guessing:.2f}: the law does not reach this size"
        )
    at_bits, reason = _at_bits(sourced, parameters, tokens, precision)
    allocations, without_optimum = _allocations(law, parameters, flops, unanswered)
    notes += [note for note in (reason, *without_optimum) if note is not None and note not in notes]
    return Prediction(
        name=name,
        form=name_of(law),
        source=sourced.source,
        parameters=parameters,
        counts_embedding=sourced.counts_embedding,
        tokens=tokens,
        loss=loss,
        bits=dict(precision.training_bits),
        loss_at_bits=at_bits,
        quantized=[TRAINING[index] for index in law.indices] if isinstance(law, PrecisionLaw) else [],
        training=_training(law, parameters, tokens),
        post=_post(law, parameters, tokens, states_critical="critical" not in unanswered),
        flops=flops,
        is_above_guessing=loss > guessing,
        notes=notes,
        allocations=allocations,
    )


def _at_bits(
    sourced: SourcedLaw, parameters: int, tokens: int, precision: PrecisionConfig
) -> tuple[float | None, str | None]:
    """Return the loss in the precision of training, or None and why it is left out."""
    law, bits = sourced.law, precision.training_bits
    known = {TRAINING[index] for index in law.indices} if isinstance(law, PrecisionLaw) else set(law.USES)
    unknown = [width for width, value in bits.items() if value != BF16 and width not in known]
    if unknown:
        return None, f"this law knows no {', '.join(unknown)}: what training in this precision costs is left out"
    if stranger := _of_other_widths(sourced, bits):
        return None, stranger
    try:
        return float(law.loss(_in_training(parameters, tokens, precision))), None
    except ValueError as error:  # it asks for a format or a group size, which this precision has not
        return None, f"the loss in this precision is left out: {error}"


def _allocations(
    law: Law, parameters: int, flops: float, unanswered: Collection[str]
) -> tuple[dict[str, Allocation], list[str]]:
    """Return the best uses of as many FLOPs, and why others have no optimum."""
    questions: dict[str, Callable[[], Allocation]] = {}
    if "split" not in unanswered:
        questions["at_16_bits"] = lambda: allocate(law, flops)
    if not {"split", "precision"} & set(unanswered) and isinstance(law, PrecisionLaw) and law.indices:
        questions["at_optimal_bits"] = lambda: allocate_with_precision(law, flops)
        questions["at_this_size"] = lambda: precision_at_size(law, parameters, flops)
    found, without = {}, dict[str, None]()  # several may lack an optimum for one reason
    for key, question in questions.items():
        try:
            found[key] = question()
        except ValueError as error:  # a law without an optimum still predicts
            without[str(error)] = None
    return found, list(without)


def _check_whole(law: Law, name: str) -> None:
    """Refuse a law that only describes differences, with which no loss can be predicted.

    Raises:
        ValueError: says what it lacks, and what it can be used for.
    """
    if lacking := [constant for constant in ("A", "alpha", "B", "beta", "E") if constant not in law.constants]:
        serves = "quantize.py --law" if "post_bits" in law.USES else "Law.training_delta of the library alone"
        raise ValueError(
            f"law {name}: has no {', '.join(lacking)}, so it predicts no loss, only what quantization adds: it serves "
            f"{serves}; plan.py needs a whole law, such as kumar2411 or one of launcher/fit.py"
        )


def _of_other_widths(sourced: SourcedLaw, bits: Mapping[str, int]) -> str | None:
    """Return why a law that is about the bits of its points says nothing of these, or None if it may."""
    widths = tuple(bits.values())
    if not sourced.law.ONE_FORMAT or not sourced.widths or {*widths} == {BF16} or widths in sourced.widths:
        return None
    known = " or ".join("/".join(f"{width:g}" for width in each) for each in sorted(sourced.widths))
    return (
        f"this law is about training in {known} bits of weights/activations/KV cache: what training in "
        f"{'/'.join(map(str, widths))} costs is left out"
    )


def _in_training(parameters: int, tokens: int, precision: PrecisionConfig) -> Points:
    """Return the point of a model that is trained in a precision."""
    exponent, mantissa = layout_of(precision.weight_format) or (np.nan, np.nan)
    return points(
        parameters,
        tokens,
        **precision.training_bits,
        group_size=np.nan if precision.group_size is None else precision.group_size,
        exponent_bits=exponent,
        mantissa_bits=mantissa,
    )


def _loss(sourced: SourcedLaw, name: str, at: Points) -> float:
    try:
        return float(sourced.law.loss(at))
    except ValueError as error:
        raise ValueError(f"law {name}: {error}") from error


def _training(law: Law, parameters: int, tokens: int) -> list[AtTrainingBits]:
    """Return the loss for each width of everything that has an f in the law, where it is defined."""
    if not isinstance(law, PrecisionLaw) or not law.indices:
        return []
    return [
        AtTrainingBits(bits, law.efficiency(bits), float(law.loss(law.at_bits(parameters, tokens, bits))))
        for bits in TRAINING_BITS
        if bits > law.threshold
    ]


def _post(law: Law, parameters: int, tokens: int, *, states_critical: bool) -> list[AtPostBits]:
    """Return the cost of post-training quantization after training in bf16, for each width."""
    if not {"C_T", "gamma_P"} & set(law.constants):
        return []
    return [
        AtPostBits(
            bits=float(bits),
            delta=float(law.post_delta(points(parameters, tokens, post_bits=bits))),
            critical_tokens=(
                critical_tokens(law, parameters, bits) if states_critical and isinstance(law, PrecisionLaw) else None
            ),
        )
        for bits in POST_BITS
    ]


def _notes(name: str, sourced: SourcedLaw, parameters: int, tokens: int) -> list[str]:
    """Return what a reader must know before believing a number."""
    notes = list(sourced.warnings)
    if name in PUBLISHED:
        notes.append("published constants belong to their data and architecture and do not transfer; fit your own")
    if sourced.missing:
        notes.append(f"not reported there: {sourced.missing}")
    for letter, value, (low, high) in (("N", parameters, sourced.parameters), ("D", tokens, sourced.tokens)):
        if value < low or value > high:
            notes.append(f"{letter} = {value:.3g} is outside of the fit, {low:.3g} to {high:.3g}")
    return notes


def lines(found: Prediction) -> Iterator[str]:
    """Yield the lines of the prediction in a plan; no more than the loss where this is above that of guessing."""
    yield f"law         {found.name} ({found.form}): {found.source}"
    yield from (f"caution     {note}" for note in found.notes)
    counted = "with" if found.counts_embedding else "without"
    yield (
        f"prediction  {found.loss:.4f} nats per token in bf16, N {found.parameters:.4g} {counted} embedding and "
        f"head, D {found.tokens:.4g}"
    )
    if found.loss_at_bits is not None and set(found.bits.values()) != {BF16}:
        widths = ", ".join(f"{name.removesuffix('_bits')} {bits}" for name, bits in found.bits.items())
        yield f"            {found.loss_at_bits:.4f} nats per token in this precision, bits of {widths}"
    yield f"compute     {found.flops:.3g} as the law counts it, (6/16) N D P with P = {BF16:g}"
    if found.is_above_guessing:
        return
    for key, best in found.allocations.items():
        yield (
            f"{SHAPES[key]:<15} N {best.parameters:.3g}, D {best.tokens:.3g}, {best.bits:.2f} bits: "
            f"{best.loss:.4f} nats"
        )
    if found.training:
        yield f"\n{'training bits':>13} {'N_eff / N':>10} {'loss':>8}   {', '.join(found.quantized)}"
        for row in found.training:
            yield f"{row.bits:>13} {row.efficiency:>10.3f} {row.loss:>8.4f}"
    if found.post:
        yield f"\n{'bits after':>13} {'added':>10} {'loss':>8}   tokens beyond which the rounded bf16 model gets worse"
        for added in found.post:
            critical = added.critical_tokens
            shown = "-" if critical is None or not math.isfinite(critical) else f"{critical:.3g}"
            yield f"{added.bits:>13g} {added.delta:>10.4f} {found.loss + added.delta:>8.4f}   {shown}"
