"""Find losses that are not comparable: of different held-out texts, tokenizations, or lengths of windows."""

from collections.abc import Iterator, Sequence
from typing import Any

from plumbline.launcher.runtime.sweep.result import Result

LENGTH = "data.sequence_length"
LEFT_OUT = 0.02
"""Relative difference of bytes per token allowed between two parts of one text."""


def caution(results: Sequence[Result]) -> str | None:
    """Return a sentence about losses of these results that are not comparable, or None if all are."""
    finished = [result for result in results if result.outcome.loss is not None]
    found = [_corpora(result.outcome.result or {}) for result in finished]
    scored = [corpora for corpora in found if corpora]
    names = dict.fromkeys(" + ".join(corpora) for corpora in scored)
    advice = (
        "nats per token do not compare; where the text is the same, bits per byte do (bits_per_byte in results.jsonl)"
    )
    if len(names) > 1:
        return f"caution: the held-out corpora differ ({'; '.join(names)}): {advice}"
    differ = [name for name in next(iter(scored), ()) if _apart([corpora[name] for corpora in scored])]
    if differ:
        return f"caution: {', '.join(differ)}: read by different tokenizers: {advice}"
    amounts = {tuple(_scored_tokens(result.outcome.result or {})) for result in finished}
    if len(amounts - {()}) > 1 or len({result.labels.get(LENGTH) for result in finished}) > 1:
        return (
            "caution: held-out text is read in windows of different length, or different amounts of it are scored "
            f"({LENGTH}, or train.eval_batches of other data.micro_batch_size): losses do not compare; eval.py with "
            "one --sequence-length scores the runs alike"
        )
    return None


def _scored_tokens(result: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each held-out corpus with its number of scored tokens."""
    for key in sorted(result):
        if key.startswith("eval/") and key.endswith("/tokens"):
            yield key, result[key]


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
