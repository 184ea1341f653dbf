"""Write the report of a folder of rows: report.md, with curves.png beside it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.quantize.curves import Outlier, correlations, draw_curves, outlier_lines
from plumbline.launcher.runtime.quantize.row import Row
from plumbline.launcher.runtime.system.files import write_whole
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import BF16, TRAINING, points

REPORT, CURVES = "report.md", "curves.png"
TITLE = "# What quantization costs"
HEADER = ("recipe", "bits stored", "loss added", "95 %", "KL", "same token", "worst layer (dB)", "seconds")
OUTLIERS: tuple[Outlier, ...] = ("kurtosis", "mmr")


def write_report(rows: Sequence[Row], folder: Path, law: Law | None = None) -> Path:
    """Write both files, and return the report's path.

    Args:
        rows: of rows.jsonl.
        folder: where the report goes.
        law: a law that covers post_bits, used to predict the deltas of recipes that only round weights.
    """
    predicted = [None if law is None else predicted_delta(law, row) for row in rows]
    pairs = [(delta, row.damage.delta) for delta, row in zip(predicted, rows, strict=True) if delta is not None]
    floor = max((row.noise_floor for row in rows), default=0.0)
    draw_curves(rows, None if law is None else pairs, floor, folder / CURVES)
    write_whole(folder / REPORT, "\n".join(_lines(rows)) + "\n")
    return folder / REPORT


def predicted_delta(law: Law, row: Row) -> float | None:
    """Return the nats that rounding adds according to the law, or None if it does not apply."""
    about = row.checkpoint
    training = (about.weight_bits, about.activation_bits, about.kv_bits)
    at = [about.parameters, about.tokens, *training, row.bits.of_weights_alone]
    known = [number for number in at if number is not None]
    if len(known) < len(at):
        return None
    if any(bits != BF16 and name not in law.USES for name, bits in zip(TRAINING.values(), training, strict=True)):
        return None  # it describes models that were trained in bf16
    try:
        return float(law.post_delta(points(*known)))
    except ValueError:  # a constant was not fitted, or the bits are outside the form's domain
        return None


def _lines(rows: Sequence[Row]) -> list[str]:
    lines = [TITLE, ""]
    for model, own in by_model(rows):
        lines += [f"## {model}", "", *(f"- {fact}" for fact in about(own[0])), "", *table(own), ""]
    lines += ["Deltas in brackets are smaller than the noise floor.", ""]
    for name in OUTLIERS:
        lines += [
            f"- {recipe}: the largest {name} of a layer's input against the loss added, {correlation}"
            for recipe, correlation in correlations(outlier_lines(rows, name)).items()
        ]
    return [*lines, "", f"![curves]({CURVES})"]


def by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return name and rows of each model, separately for each text on which it was scored."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.scored, []).append(row)
    return [(_name(own[0]), own) for own in groups.values()]


def _name(row: Row) -> str:
    average = row.checkpoint.average
    return f"{row.checkpoint.model}, {average}" if average else row.checkpoint.model


def about(row: Row) -> list[str]:
    """Return lines on what all rows of a model share."""
    model, text, damage = row.checkpoint, row.text, row.damage
    facts = [
        f"loss {row.base_loss_shown} nats per token on {damage.predicted_tokens:,} tokens of {text.data} in "
        f"{damage.sequences:,} sequences of {text.sequence_length}",
        f"{model.parameters:,} parameters without embedding and head",
    ]
    if model.tokens is not None:
        facts.append(f"{model.tokens:,} tokens of training, {model.tokens_per_parameter:.1f} for each parameter")
    if model.lr_phase is not None:
        facts.append(f"learning rate: {model.lr_phase}, {model.lr_factor:.3g} of the peak {model.lr:g}")
    facts.append(f"noise floor {row.noise_floor:.1e}: what bf16 arithmetic may change (95 %)")
    return facts


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows of one model as Markdown."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    return lines + [f"| {' | '.join(cells_of(row))} |" for row in in_order(rows)]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by damage, least first and non-finite last."""
    return sorted(rows, key=lambda row: (math.isnan(row.damage.delta), row.damage.delta))


def cells_of(row: Row) -> tuple[str, ...]:
    """Format a row as text for the columns of HEADER."""
    damage, rounding = row.damage, row.rounding
    low, high = damage.delta_interval
    return (
        row.recipe,
        "" if rounding.stored_bits is None else f"{rounding.stored_bits:.2f}",
        delta_of(row),
        "-" if math.isnan(low) else f"{low:+.4f} to {high:+.4f}",
        f"{damage.kl:.2g}",
        f"{damage.agreement:.1%}",
        "" if rounding.sqnr_least is None else f"{rounding.sqnr_least:.1f}",
        f"{rounding.seconds:.1f}",
    )


def delta_of(row: Row) -> str:
    """Format the loss that rounding adds, in brackets if it is below the noise floor."""
    delta = f"{row.damage.delta:+.4f}"
    return f"({delta})" if abs(row.damage.delta) < row.noise_floor else delta
