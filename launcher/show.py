# PYTHON_ARGCOMPLETE_OK
"""Look at data: what a corpus holds, what a run saw in a step, when it reads a text, which sample made a spike.

python launcher/show.py corpora/stdlib                              # counts, lengths, frequent tokens, samples
python launcher/show.py runs/quickstart                             # the same of all that the run reads
python launcher/show.py runs/quickstart --step 123                  # the samples that step trained on
python launcher/show.py runs/quickstart --step 123 --rank 1         # those that rank 1 took
python launcher/show.py runs/quickstart --find "def main("          # where the text is, and in which steps it is read
python launcher/show.py runs/quickstart --step 123 --loss           # each sample's loss, worst first

Step N is the state after N updates, as in metrics.jsonl. Its samples are those that update N trained on; the loss that
metrics.jsonl has for step N is theirs, by the weights of step N - 1.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.launcher.runtime.system import cli

if TYPE_CHECKING:
    from plumbline.data.streams import SampleSource
    from plumbline.data.tokenizers import Decoder
    from plumbline.launcher.runtime.inspection.seen import Read, SeenRun, Step

OF_STEP = ("rank", "world_size", "loss")
"""Options that go with --step only."""
OF_LOSS = ("checkpoint",)
"""Options that go with --loss only."""
FOUND, STEPS = 20, 12
"""Documents that --find lists, and steps that it names for each."""
SAMPLES, LENGTH = 3, 256
"""Samples of a corpus that are shown, and their tokens."""
FREQUENT = 16
"""Frequent tokens that are shown."""
SHOWN = 8
"""Samples of a step that are shown, and in detail the worst ones."""


def corpus_or_run(text: str) -> Path:
    """Return the path of a folder, or the prefix of a bare Megatron-LM pair, for argparse."""
    return Path(text) if Path(f"{text}.idx").is_file() else cli.existing(text)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=corpus_or_run, metavar="CORPUS|RUN", help="corpus, PREFIX of a pair, run folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=cli.positive, metavar="N", help="of a run: the samples that update N trained on")
    what.add_argument("--find", metavar="TEXT", help="documents and examples to train on that hold this text")
    parser.add_argument("--rank", type=cli.natural, help="of --step: what this rank took of it")
    parser.add_argument(
        "--world-size", type=cli.positive, help="of --rank: of how many (default: as in the run's last start)"
    )
    parser.add_argument("--loss", action="store_true", help="of --step: the loss of each sample, worst first")
    parser.add_argument(
        "--checkpoint", type=cli.existing, help="of --loss: whose weights (default: the newest before the step)"
    )
    parser.add_argument("--full", action="store_true", help="cut no text and leave out no sample")
    cli.add_arithmetic_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document, with all samples of a step")
    arguments = parser.parse_args()
    for options, needed in ((OF_STEP, "step"), (OF_LOSS, "loss")):
        for name in options:
            if getattr(arguments, name) not in (None, False) and not getattr(arguments, needed):
                parser.error(f"--{name.replace('_', '-')} goes with --{needed}: give it, or leave this out")
    if arguments.world_size is not None and arguments.rank is None:
        parser.error("--world-size goes with --rank: a step holds the same samples for every number of ranks")
    return arguments


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from dataclasses import asdict

from plumbline.data.corpus import Split, open_corpus
from plumbline.data.counting import count
from plumbline.data.finding import Found, find
from plumbline.launcher.runtime.inspection.samples import decoders, spread
from plumbline.launcher.runtime.inspection.text import count_lines, escaped, sample_lines, steps_in_words


def main() -> None:
    """Open what was named, and show what was asked for."""
    arguments = parse_arguments()
    if (arguments.data / "config.yaml").is_file():
        show_run(arguments)
    elif arguments.step is not None:
        raise ValueError(f"--step {arguments.step}: {arguments.data} is no run (no config.yaml), so it has no steps")
    else:
        show_corpus(arguments)


def show_corpus(arguments: argparse.Namespace) -> None:
    """Show a corpus, or where it holds a text."""
    corpus = open_corpus(arguments.data)
    sources: dict[str, SampleSource] = {corpus.name: corpus}
    if arguments.find is not None:
        found = ((corpus.name, it) for it in find(corpus, arguments.find, None))
        print_found(arguments, sources, list(islice(found, FOUND)), None)
        return
    facts: dict[str, Any] = {
        "corpus": str(corpus),
        "tokenizer": None if corpus.manifest is None else corpus.manifest.tokenizer.spec,
        "vocab_size": corpus.vocab_size,
        "sources": {},
        "samples": [],
    }
    show_sources(arguments, facts, sources, [])


def show_sources(
    arguments: argparse.Namespace, facts: dict[str, Any], sources: "Mapping[str, SampleSource]", lines: list[str]
) -> None:
    """Count what sources hold, and show some samples of each, behind some facts and lines."""
    decoder_of = decoders(sources)
    for name, source in sources.items():
        stated = facts["sources"].setdefault(name, {})
        lines.append(f"{name}: {source}" + "".join(f", {key} {value:,.6g}" for key, value in numbers(stated)))
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
                    {"token": token, "text": spelled(decoder_of[name], [token]), "count": number}
                    for token, number in counts.frequent(FREQUENT)
                ],
            }
            size = "" if split.source_bytes is None else f", {split.source_bytes / 1e6:.2f} MB of text"
            lines.append(f"{split_name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens{size}")
            lines.extend(count_lines(counts, split.num_tokens, decoder_of[name], FREQUENT))
        length = facts.get("sequence_length", LENGTH)
        for sample in spread(name, source.splits.get("train", source.held_out), SAMPLES, length):
            facts["samples"].append(sample.facts(decoder_of[name]))
            lines.extend(sample_lines(sample, decoder_of[name], arguments.full))
    answer(arguments, facts, lines)


def show_run(arguments: argparse.Namespace) -> None:
    """Show what a run reads, a step of it, or the steps that read a text."""
    from plumbline.launcher.runtime.inspection.seen import SeenRun  # of a corpus alone, torch is not needed

    run = SeenRun(arguments.data)
    if arguments.find is not None:
        print_found(arguments, run.batches.corpora, list(run.find(arguments.find, FOUND)), run)
    elif arguments.step is None:
        facts = {**run.overview(), "samples": []}
        lines = [
            f"{run.folder}: {facts['tokens']:,} tokens in {facts['steps']:,} steps, {run.last_step:,} of them made"
        ]
        show_sources(arguments, facts, run.batches.corpora, lines)
    elif arguments.loss:
        show_losses(arguments, run)
    else:
        show_step(arguments, run)


def show_step(arguments: argparse.Namespace, run: "SeenRun") -> None:
    """Show the samples of a step."""
    step = run.step(arguments.step, arguments.rank, arguments.world_size)
    lines = [heading(arguments, run, step)]
    shown = step.samples if arguments.full else step.samples[:SHOWN]
    for sample in shown:
        lines.extend(sample_lines(sample, run.decoders[sample.source], arguments.full))
    if len(shown) < len(step.samples):
        lines.append(f"... {len(step.samples) - len(shown):,} more samples (--full)")
    facts = {
        "run": str(run.folder),
        "step": arguments.step,
        "rank": arguments.rank,
        "recorded_loss": run.losses.get(arguments.step),
        "samples": [sample.facts(run.decoders[sample.source]) for sample in step.samples],
    }
    answer(arguments, facts, lines)


def heading(arguments: argparse.Namespace, run: "SeenRun", step: "Step") -> str:
    """Return which samples a step has, and whether it has been made."""
    rank = "" if arguments.rank is None else f" on rank {arguments.rank}"
    numbers = [sample.number for sample in step.samples if sample.number is not None]
    when = "trained" if arguments.step <= run.last_step else "will train"
    loss = run.losses.get(arguments.step)
    recorded = "" if loss is None else f"; its loss in metrics.jsonl is {loss:.4f}"
    return (
        f"step {arguments.step} of {run.folder}{rank}: {len(numbers)} samples from {min(numbers)} to {max(numbers)}, "
        f"on which update {arguments.step} {when}{recorded}"
    )


def show_losses(arguments: argparse.Namespace, run: "SeenRun") -> None:
    """Score the samples of a step by a checkpoint, and show the worst."""
    from plumbline.launcher.runtime.inspection.losses import checkpoint_before, mean_loss, sample_losses
    from plumbline.launcher.runtime.models.open import DTYPES, device_named, load_model

    step = run.step(arguments.step, arguments.rank, arguments.world_size)
    folder = arguments.checkpoint or checkpoint_before(run, arguments.step)
    model = load_model(folder, device_named(arguments.device), DTYPES[arguments.dtype])
    losses = sample_losses(model, step)
    samples = {sample.number: sample for sample in step.samples}
    lines = [heading(arguments, run, step), f"by {model.source}: {mean_loss(losses):.4f} nats over all labels"]
    for number, its in enumerate(losses):
        sample = samples[its.sample]
        decoder = run.decoders[sample.source]
        lines.append(f"{its.loss:9.4f}  sample {its.sample}  {sample.source}, window {sample.window}")
        if number < SHOWN or arguments.full:
            lines.extend(
                f"  {worst.nats:9.4f}  token {worst.position + 1}: {written(decoder, [worst.token])} after "
                f"{written(decoder, sample.tokens[max(0, worst.position - 7) : worst.position + 1])}"
                for worst in its.worst
            )
    worst_sample = samples[losses[0].sample]
    lines.append("the worst one:")
    lines.extend(sample_lines(worst_sample, run.decoders[worst_sample.source], arguments.full))
    facts = {
        "run": str(run.folder),
        "step": arguments.step,
        "rank": arguments.rank,
        "checkpoint": str(model.source),
        "checkpoint_step": model.step,
        "loss": mean_loss(losses),
        "recorded_loss": run.losses.get(arguments.step),
        "samples": [
            {**samples[its.sample].facts(run.decoders[samples[its.sample].source]), **asdict(its)} for its in losses
        ],
    }
    answer(arguments, facts, lines)


def print_found(
    arguments: argparse.Namespace,
    sources: "Mapping[str, SampleSource]",
    found: list[tuple[str, Found]],
    run: "SeenRun | None",
) -> None:
    """Show which documents and examples hold a text, and of a run, in which steps they are read."""
    facts: dict[str, Any] = {
        "data": str(arguments.data),
        "text": arguments.find,
        "all_found": len(found) < FOUND,
        "found": [],
    }
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
        lines.append(f"no document or example to train on holds {escaped(arguments.find)!r}")
    elif not facts["all_found"]:
        lines.append(f"these are the first {FOUND}; a longer text is in fewer")
    answer(arguments, facts, lines)


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


def spelled(decoder: "Decoder | None", tokens: Sequence[int]) -> str | None:
    """Return the text of some tokens; None where they are no text."""
    return None if decoder is None else decoder(tokens)


def written(decoder: "Decoder | None", tokens: Sequence[int]) -> str:
    """Return some tokens in a line: their text between quotes, or their ids."""
    return " ".join(map(str, tokens)) if decoder is None else repr(decoder(tokens))


def numbers(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers among some facts, with their names."""
    return ((key, value) for key, value in facts.items() if isinstance(value, (int, float)))


def answer(arguments: argparse.Namespace, facts: dict[str, Any], lines: list[str]) -> None:
    """Print facts for programs or lines for people."""
    if arguments.json:
        cli.print_json(facts)
        return
    for line in lines:
        print(line)


if __name__ == "__main__":
    cli.run(main)
