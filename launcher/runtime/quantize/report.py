"""Write the report of a folder of rows: report.md, with curves.png beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plumbline.launcher.runtime.quantize.curves import draw_curves, outlier_pairs, rounds_weights_alone, spearman
from plumbline.launcher.runtime.system.files import write_whole
from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.points import points

REPORT, CURVES = "report.md", "curves.png"
TITLE = "# What quantization costs"
ALIKE = ("model", "average", "data", "sequence_length", "batch_size", "max_batches", "calibration_sequences")
Row = dict[str, Any]


def write_report(rows: Sequence[Row], folder: Path, law: Law | None = None) -> Path:
    """Write both files, and return the report's path.

    Args:
        rows: of rows.jsonl.
        folder: where the report goes.
        law: one that knows post_bits; it predicts the deltas of recipes that round weights alone.
    """
    rows = [{**row, "predicted_delta": None if law is None else predicted_delta(law, row)} for row in rows]
    floor = max((row["noise_floor"] for row in rows), default=0.0)
    draw_curves(rows, floor, folder / CURVES)
    write_whole(folder / REPORT, "\n".join(_lines(rows)) + "\n")
    return folder / REPORT


def predicted_delta(law: Law, row: Row) -> float | None:
    """Return the nats that the law says rounding adds; None where it has nothing to say."""
    at = [row[key] for key in ("parameters", "tokens", "weight_bits", "activation_bits", "kv_bits", "post_bits")]
    if None in at or not rounds_weights_alone(row):
        return None
    try:
        return float(law.post_delta(points(*at)))
    except ValueError:  # a constant that was not fitted, or bits beyond the form's reach
        return None


def _lines(rows: Sequence[Row]) -> list[str]:
    lines = [TITLE, ""]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ALIKE), []).append(row)
    for own in groups.values():
        average = f", {own[0]['average']}" if own[0]["average"] else ""
        lines += [f"## {own[0]['model']}{average}", "", *_about(own[0]), "", *table(own), ""]
    lines += ["Deltas in brackets are smaller than the noise floor.", ""]
    for name in ("kurtosis", "mmr"):
        pairs = outlier_pairs(rows, f"{name}_largest")
        if len(pairs) >= 3:
            lines.append(
                f"Where activations are rounded, the largest {name} of a layer's input goes with the loss added: "
                f"Spearman {spearman(pairs):+.2f} over {len(pairs)} rows."
            )
    return [*lines, "", f"![curves]({CURVES})"]


def _about(row: Row) -> list[str]:
    """Return what is the same for all rows of a model."""
    facts = [
        f"loss {row['base_loss']:.4f} nats per token on {row['predicted_tokens']:,} tokens of {row['data']} in "
        f"{row['sequences']:,} sequences of {row['sequence_length']}",
        f"{row['parameters']:,} parameters in blocks",
    ]
    if row["tokens"] is not None:
        facts.append(f"{row['tokens']:,} tokens of training, {row['tokens_per_parameter']:.1f} for each parameter")
    if row["lr_phase"] is not None:
        facts.append(f"learning rate: {row['lr_phase']}, {row['lr_factor']:.3g} of the peak {row['lr']:g}")
    facts.append(f"noise floor {row['noise_floor']:.1e}: what bf16 arithmetic changes")
    return [f"- {fact}" for fact in facts]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows of one model as Markdown, the least damage first."""
    header = ("recipe", "bits stored", "loss added", "95 %", "KL", "same token", "worst layer (dB)", "seconds")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for row in sorted(rows, key=lambda row: row["delta"]):
        delta, (low, high) = f"{row['delta']:+.4f}", row["delta_interval"]
        cells = (
            row["recipe"],
            "" if row["stored_bits"] is None else f"{row['stored_bits']:.2f}",
            f"({delta})" if abs(row["delta"]) < row["noise_floor"] else delta,
            f"{low:+.4f} to {high:+.4f}",
            f"{row['kl']:.2g}",
            f"{row['agreement']:.1%}",
            "" if row["sqnr_least"] is None else f"{row['sqnr_least']:.1f}",
            f"{row['seconds']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
