"""Find losses that are not comparable: per token of different held-out texts, or of different tokenizations."""

from collections.abc import Sequence
from typing import Any

from plumbline.launcher.runtime.sweep.result import Result

LEFT_OUT = 0.02
"""Relative difference of bytes per token allowed between two parts of one text."""


def caution(results: Sequence[Result]) -> str | None:
    """Return a sentence about losses of these results that are not comparable, or None if all are."""
    found = [_corpora(result.outcome.result or {}) for result in results if result.outcome.loss is not None]
    scored = [corpora for corpora in found if corpora]
    names = dict.fromkeys(" + ".join(corpora) for corpora in scored)
    advice = (
        "nats per token do not compare; where the text is the same, bits per byte do (bits_per_byte in results.jsonl)"
    )
    if len(names) > 1:
        return f"caution: the held-out corpora differ ({'; '.join(names)}): {advice}"
    differ = [name for name in next(iter(scored), ()) if _apart([corpora[name] for corpora in scored])]
    return f"caution: {', '.join(differ)}: read by different tokenizers: {advice}" if differ else None


def _corpora(result: dict[str, Any]) -> dict[str, float]:
    """Return held-out corpus -> nats per bit per byte, which depends only on text and tokenizer, or 0 without text."""
    found = {}
    for key in sorted(result):
        if key.startswith("eval/") and key.endswith("/loss"):
            bits = result.get(f"{key.removesuffix('loss')}bits_per_byte")
            found[key.removeprefix("eval/").removesuffix("/loss")] = result[key] / bits if bits else 0.0
    return found


def _apart(ratios: Sequence[float]) -> bool:
    """Return whether ratios differ by more than windows of different lengths can explain."""
    return max(ratios) > (1 + LEFT_OUT) * min(ratios)
