"""Predict by a law what a configuration comes to: its loss, other widths, and better ways to spend its compute."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from plumbline.launcher.runtime.laws.document import open_law, plain
from plumbline.model.scaling_laws.derived import (
    Allocation,
    allocate,
    allocate_with_precision,
    critical_tokens,
    precision_at_size,
)
from plumbline.model.scaling_laws.forms import name_of
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import BF16, TRAINING, Points, points
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.published import PUBLISHED, SourcedLaw

TRAINING_BITS = (4, 5, 6, 7, 8, 12, 16)
POST_BITS = (3, 4, 5, 6, 8)
SHAPES = {"at_16_bits": "best split", "at_optimal_bits": "best precision", "at_this_size": "at this size"}


def predict(name: str, parameters: int, tokens: int, bits: Mapping[str, int]) -> dict[str, Any]:
    """Return every number of the prediction, as plain values.

    Args:
        name: of a published law, or a law.json.
        parameters: N, without embedding and head.
        tokens: D.
        bits: weight_bits, activation_bits and kv_bits of training, 16 where nothing is rounded.

    Raises:
        ValueError: no such law, or it does not know what the loss needs.
    """
    sourced = open_law(name)
    law = sourced.law
    flops = 6.0 * parameters * tokens
    facts: dict[str, Any] = {
        "name": name,
        "form": name_of(law),
        "source": sourced.source,
        "parameters": parameters,
        "tokens": tokens,
        "loss": _loss(sourced, name, points(parameters, tokens)),
        "bits": dict(bits),
        "loss_at_bits": _loss(sourced, name, points(parameters, tokens, **bits)),
        "quantized": [TRAINING[index] for index in law.indices] if isinstance(law, PrecisionLaw) else [],
        "training": _training(law, parameters, tokens),
        "post": _post(law, parameters, tokens),
        "flops": flops,
        "notes": _notes(name, sourced, parameters, tokens),
    }
    questions: dict[str, Callable[[], Allocation]] = {"at_16_bits": lambda: allocate(law, flops)}
    if isinstance(law, PrecisionLaw) and law.indices:
        questions["at_optimal_bits"] = lambda: allocate_with_precision(law, flops)
        questions["at_this_size"] = lambda: precision_at_size(law, parameters, flops)
    for key, question in questions.items():
        try:
            facts[key] = asdict(question())
        except ValueError as error:  # a law without an optimum still predicts
            facts["notes"].append(str(error))
    found: dict[str, Any] = plain(facts)
    return found


def _loss(sourced: SourcedLaw, name: str, at: Points) -> float:
    try:
        return float(sourced.law.loss(at))
    except ValueError as error:
        raise ValueError(f"law {name}: {error}") from error


def _training(law: Law, parameters: int, tokens: int) -> list[dict[str, float]]:
    """Return the loss by the width of everything that the law has an f for, where it has a meaning."""
    if not isinstance(law, PrecisionLaw) or not law.indices:
        return []
    return [
        {
            "bits": bits,
            "efficiency": law.efficiency(bits),
            "loss": float(law.loss(law.at_bits(parameters, tokens, bits))),
        }
        for bits in TRAINING_BITS
        if bits > law.threshold
    ]


def _post(law: Law, parameters: int, tokens: int) -> list[dict[str, float]]:
    """Return what quantization after training in bf16 adds, by width."""
    if not {"C_T", "gamma_P"} & set(law.constants):
        return []
    rows = []
    for bits in POST_BITS:
        row = {"bits": float(bits), "delta": float(law.post_delta(points(parameters, tokens, post_bits=bits)))}
        if isinstance(law, PrecisionLaw):
            row["critical_tokens"] = critical_tokens(law, parameters, bits)
        rows.append(row)
    return rows


def _notes(name: str, sourced: SourcedLaw, parameters: int, tokens: int) -> list[str]:
    """Return what a reader must know before believing a number."""
    notes = []
    if name in PUBLISHED:
        notes.append("published constants belong to their data and architecture and do not transfer; fit your own")
    if sourced.missing:
        notes.append(f"not reported there: {sourced.missing}")
    for letter, value, (low, high) in (("N", parameters, sourced.parameters), ("D", tokens, sourced.tokens)):
        if value < low or value > high:
            notes.append(f"{letter} = {value:.3g} is outside of the fit, {low:.3g} to {high:.3g}")
    return notes


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the prediction in a plan."""
    yield f"law         {facts['name']} ({facts['form']}): {facts['source']}"
    yield from (f"caution     {note}" for note in facts["notes"])
    yield (
        f"prediction  {facts['loss']:.4f} nats per token in bf16, N {facts['parameters']:.4g} without embedding and "
        f"head, D {facts['tokens']:.4g}"
    )
    if set(facts["bits"].values()) != {BF16}:
        widths = ", ".join(f"{name.removesuffix('_bits')} {bits}" for name, bits in facts["bits"].items())
        yield f"            {facts['loss_at_bits']:.4f} nats per token in this precision, bits of {widths}"
    yield f"compute     {facts['flops']:.3g} as the law counts it, (6/16) N D P with P = {BF16:g}"
    for key, title in SHAPES.items():
        if key in facts:
            best = facts[key]
            yield (
                f"{title:<15} N {best['parameters']:.3g}, D {best['tokens']:.3g}, {best['bits']:.2f} bits: "
                f"{best['loss']:.4f} nats"
            )
    if facts["training"]:
        yield f"\n{'training bits':>13} {'N_eff / N':>10} {'loss':>8}   {', '.join(facts['quantized'])}"
        for row in facts["training"]:
            yield f"{row['bits']:>13} {row['efficiency']:>10.3f} {row['loss']:>8.4f}"
    if facts["post"]:
        yield f"\n{'bits after':>13} {'added':>10} {'loss':>8}   tokens beyond which the rounded bf16 model gets worse"
        for row in facts["post"]:
            critical = row.get("critical_tokens")
            yield (
                f"{row['bits']:>13g} {row['delta']:>10.4f} {facts['loss'] + row['delta']:>8.4f}   "
                f"{'-' if critical is None else f'{critical:.3g}'}"
            )
