"""Find the documents and examples that contain a text, and the steps that read them, without importing torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.data.corpus import Corpus, Split
from plumbline.data.finding import Found, find
from plumbline.data.streams import SampleSource
from plumbline.launcher.runtime.commands.cli import escaped
from plumbline.launcher.runtime.inspection.text import Answer, steps_in_words

if TYPE_CHECKING:
    from plumbline.launcher.runtime.inspection.seen import Read, SeenRun

FOUND, STEPS = 20, 12
"""Most documents and examples to list, and most steps to name for each."""


def find_in_corpus(corpus: Corpus, text: str, folder: Path) -> Answer:
    """Find the documents of a corpus, opened at `folder`, that contain a text.

    Raises:
        ValueError: the tokens of the corpus are not text, or the text to find is empty.
    """
    found = ((corpus.name, it) for it in find(corpus, text, None))
    return _tell(folder, text, {corpus.name: corpus}, list(islice(found, FOUND)), None)


def find_in_run(run: "SeenRun", text: str) -> Answer:
    """Find the documents and examples of a run's sources that contain a text, and the steps that read them.

    Raises:
        ValueError: no source is text, or the text to find is empty.
    """
    return _tell(run.folder, text, run.batches.corpora, list(run.find(text, FOUND)), run)


def _tell(
    folder: Path,
    text: str,
    sources: Mapping[str, SampleSource],
    found: list[tuple[str, Found]],
    run: "SeenRun | None",
) -> Answer:
    """Report what was found, each with the name of its source, as facts and as lines."""
    facts: dict[str, Any] = {"data": str(folder), "text": text, "all_found": len(found) < FOUND, "found": []}
    lines = []
    for name, it in found:
        entry: dict[str, Any] = {"source": name, "first": it.first, "stop": it.stop}
        is_text = isinstance(sources[name].splits["train"], Split)
        place = f"document of tokens {it.first:,} to {it.stop - 1:,}" if is_text else f"example {it.first:,}"
        lines.append(f"{name}: {place}")
        if run is not None:
            reads = run.reads(name, it)
            entry |= {"windows": [*it.windows], "reads": [asdict(read) for read in reads], "more_text": it.more}
            lines.extend(read_lines(run, it, reads))
        facts["found"].append(entry)
    if not found:
        lines.append(f"no document or example to train on holds {escaped(text)!r}")
    elif not facts["all_found"]:
        lines.append(f"these are the first {FOUND}; a longer text is in fewer")
    return facts, lines


def read_lines(run: "SeenRun", found: Found, reads: "list[Read]") -> Iterator[str]:
    """Yield the steps that read the text, and those that read the rest of its document."""
    if not found.windows:
        yield "  in no step: it is in the last tokens of the split, which fill no window"
        return
    text = sorted({read.step for read in reads if read.holds_text})
    rest = sorted({read.step for read in reads if not read.holds_text}.difference(text))
    until = f"of {run.plan.total_steps:,}, of which {run.last_step:,} are made"
    yield f"  the text is read in {f'steps {steps_in_words(text, STEPS)}' if text else 'no step'} {until}"
    if rest:
        more = ", where it may hold more of the text," if found.more else ""
        yield f"  the rest of its document{more} in steps {steps_in_words(rest, STEPS)}"
