"""Say which documents and examples hold a text, and in which steps a run reads them; nothing here imports torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.data.corpus import Corpus, Split
from plumbline.data.finding import Found, find
from plumbline.data.streams import SampleSource
from plumbline.launcher.runtime.inspection.text import Answer, escaped, steps_in_words

if TYPE_CHECKING:
    from plumbline.launcher.runtime.inspection.seen import Read, SeenRun

FOUND, STEPS = 20, 12
"""Documents and examples that are listed, and steps that are named for each."""


def find_in_corpus(corpus: Corpus, text: str, folder: Path) -> Answer:
    """Say which documents of a corpus, opened at `folder`, hold a text.

    Raises:
        ValueError: its tokens are no text, or there is nothing to look for.
    """
    found = ((corpus.name, it) for it in find(corpus, text, None))
    return _tell(folder, text, {corpus.name: corpus}, list(islice(found, FOUND)), None)


def find_in_run(run: "SeenRun", text: str) -> Answer:
    """Say which documents and examples of a run's sources hold a text, and in which steps they are read.

    Raises:
        ValueError: no source is text, or there is nothing to look for.
    """
    return _tell(run.folder, text, run.batches.corpora, list(run.find(text, FOUND)), run)


def _tell(
    folder: Path,
    text: str,
    sources: Mapping[str, SampleSource],
    found: list[tuple[str, Found]],
    run: "SeenRun | None",
) -> Answer:
    """Return what was found, a name of a source with each, in facts and in lines."""
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
    """Yield the steps in which the text is read, and those of the rest of its document."""
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
