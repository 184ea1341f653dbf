"""Describe the contents of a corpus, or of all sources of a run, without importing torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plumbline.data.corpus import Corpus, Split
from plumbline.data.counting import count
from plumbline.data.sizes import counted, in_units
from plumbline.data.streams import SampleSource
from plumbline.data.tokenizers import Decoder
from plumbline.launcher.runtime.inspection.samples import decoders, spread
from plumbline.launcher.runtime.inspection.text import Answer, count_lines, sample_lines

if TYPE_CHECKING:
    from plumbline.launcher.runtime.inspection.seen import SeenRun

SAMPLES, LENGTH = 3, 256
"""Samples to show per source, and their number of tokens if there is no run."""
FREQUENT = 16
"""Most frequent tokens to show."""


def tell_corpus(corpus: Corpus, full: bool) -> Answer:
    """Count the contents of a corpus, and show some samples, cut unless `full`."""
    found, lines = _tell_sources({corpus.name: corpus}, {}, LENGTH, full)
    facts = {
        "corpus": str(corpus),
        "tokenizer": None if corpus.manifest is None else corpus.manifest.tokenizer.spec,
        "vocab_size": corpus.vocab_size,
        **found,
    }
    return facts, lines


def tell_run(run: "SeenRun", full: bool) -> Answer:
    """Count the contents of a run's sources, with the share of each, and show some samples, cut unless `full`."""
    facts = run.overview()
    found, lines = _tell_sources(run.batches.corpora, facts["sources"], facts["sequence_length"], full)
    first = f"{run.folder}: {facts['tokens']:,} tokens in {facts['steps']:,} steps, {run.last_step:,} of them made"
    return {**facts, **found}, [first, *lines]


def _tell_sources(
    sources: Mapping[str, SampleSource], known: Mapping[str, Mapping[str, Any]], length: int, full: bool
) -> Answer:
    """Count the contents of sources, and show some samples of each.

    Args:
        sources: sources by name.
        known: name -> facts to put first.
        length: tokens of a sample.
        full: do not cut texts.
    """
    facts: dict[str, Any] = {"sources": {name: {**stated} for name, stated in known.items()}, "samples": []}
    lines: list[str] = []
    decoder_of = decoders(sources)
    for name, source in sources.items():
        stated = facts["sources"].setdefault(name, {})
        lines.append(f"{name}: {source}" + "".join(f", {key} {value:,.6g}" for key, value in _numbers(stated)))
        stated["splits"] = {}
        for split_name, split in source.splits.items():
            if not isinstance(split, Split):
                continue
            counts = count(split)
            stated["splits"][split_name] = {
                "documents": split.num_documents,
                "tokens": split.num_tokens,
                "source_bytes": split.source_bytes,
                "counted_tokens": counts.tokens,
                "document_lengths": [
                    dict(zip(("from", "to", "documents"), row, strict=True)) for row in counts.lengths
                ],
                "frequent_tokens": [
                    {"token": token, "text": _spelled(decoder_of[name], [token]), "count": number}
                    for token, number in counts.frequent(FREQUENT)
                ],
            }
            size = "" if split.source_bytes is None else f", {in_units(split.source_bytes)} of text"
            lines.append(
                f"{split_name}: {counted(split.num_documents, 'document')}, {counted(split.num_tokens, 'token')}{size}"
            )
            lines.extend(count_lines(counts, split.num_tokens, decoder_of[name], FREQUENT))
        for sample in spread(name, source.splits.get("train", source.held_out), SAMPLES, length):
            facts["samples"].append(sample.facts(decoder_of[name]))
            lines.extend(sample_lines(sample, decoder_of[name], full))
    return facts, lines


def _spelled(decoder: Decoder | None, tokens: Sequence[int]) -> str | None:
    """Return the text of some tokens, or None if they are not text."""
    return None if decoder is None else decoder(tokens)


def _numbers(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers among some facts, with their names."""
    return ((key, value) for key, value in facts.items() if isinstance(value, (int, float)))
