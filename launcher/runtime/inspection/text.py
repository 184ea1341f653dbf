"""Format samples and counts for a terminal, with control characters escaped."""

from collections.abc import Iterator, Sequence
from typing import Any

from plumbline.data.counting import Counts
from plumbline.data.streams import IGNORED
from plumbline.data.tokenizers import Decoder
from plumbline.launcher.runtime.commands.cli import escaped
from plumbline.launcher.runtime.inspection.samples import Sample

Answer = tuple[dict[str, Any], list[str]]
"""The same content as facts for programs and as lines for people."""

CUT = 600
"""Characters (or tokens that are not text) of a document to show."""

DOCUMENTS = 4
"""Documents of a sample to show."""

BAR = 40
"""Width of the longest bar of a histogram."""


def block(text: str, full: bool) -> Iterator[str]:
    """Yield the lines of a text, each after a vertical rule; a long text is cut unless `full`."""
    shown = text if full else text[:CUT]
    for line in shown.split("\n"):
        yield f"  | {escaped(line)}"
    if len(text) > len(shown):
        yield f"  ... {len(text) - len(shown):,} more characters (--full)"


def sample_lines(sample: Sample, decoder: Decoder | None, full: bool) -> Iterator[str]:
    """Yield the contents of a sample, document by document, or the prompt and answer of a task."""
    number = f"sample {sample.number}  " if sample.number is not None else ""
    epoch = f", epoch {sample.epoch}" if sample.epoch is not None else ""
    many = f", {len(sample.begins)} documents" if len(sample.begins) > 1 else ""
    yield f"{number}{sample.source}{epoch}, window {sample.window}: {len(sample.tokens)} tokens{many}"
    if decoder is None:
        yield from block(_in_numbers(sample), full)
    elif sample.prompt is not None:
        yield from block(decoder(sample.prompt), full)
        yield "  answer"
        yield from block(decoder([label for label in sample.labels if label != IGNORED]), full)
    else:
        shown = sample.documents if full else sample.documents[:DOCUMENTS]
        for first, stop in shown:
            if first:
                yield f"  -- a document begins at token {first}"
            yield from block(decoder(sample.tokens[first:stop]), full)
        if len(shown) < len(sample.documents):
            yield f"  ... {len(sample.documents) - len(shown)} more documents (--full)"


def _in_numbers(sample: Sample) -> str:
    """Return the ids of a sample, one line per document, with answers in brackets."""
    answers = sample.has_answers
    # A label comes after its position: answers are among the tokens, and one may follow the last
    words = [str(sample.tokens[0])] + [
        f"[{label}]" if answers and label != IGNORED else str(token)
        for token, label in zip([*sample.tokens[1:], sample.labels[-1]], sample.labels, strict=True)
    ]
    ends = [stop for _, stop in sample.documents]
    ends[-1] += answers and sample.labels[-1] != IGNORED
    return "\n".join(" ".join(words[first:stop]) for first, stop in zip(sample.begins, ends, strict=True))


def count_lines(counts: Counts, total: int, decoder: Decoder | None, most: int) -> Iterator[str]:
    """Yield the histogram of the lengths of documents, and the most frequent tokens."""
    part = "" if counts.tokens == total else f" that begin in {counts.tokens:,} of its tokens, from everywhere"
    yield f"  documents{part}, by their tokens"
    rows = counts.lengths
    longest = max((number for _, _, number in rows), default=1)
    for first, last, number in rows:
        yield f"  {first:>13,} to {last:>13,}  {number:>13,}  {'#' * -(-BAR * number // longest)}"
    yield f"  most frequent of {counts.tokens:,} tokens"
    for token, number in counts.frequent(most):
        spelled = "" if decoder is None else f"  {decoder([token])!r}"
        yield f"  {token:>13} {number:>13,}  {number / counts.tokens:>7.2%}{spelled}"


def steps_in_words(steps: Sequence[int], most: int) -> str:
    """List up to `most` steps in words."""
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return ", ".join(f"{step:,}" for step in steps[:most]) + more
