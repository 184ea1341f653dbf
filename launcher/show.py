# PYTHON_ARGCOMPLETE_OK
"""Show data: a corpus, the samples of a step of a run, the steps that read a text, the sample that caused a spike.

python launcher/show.py corpora/stdlib                              # counts, lengths, frequent tokens, samples
python launcher/show.py runs/quickstart                             # the same for all data of the run
python launcher/show.py runs/quickstart --step 123                  # the samples that step trained on
python launcher/show.py runs/quickstart --step 123 --rank 1         # those that rank 1 took
python launcher/show.py runs/quickstart --find "def main("          # where the text is, and in which steps it is read
python launcher/show.py runs/quickstart --step 123 --loss           # each sample's loss, worst first

Step N is the state after N updates, as in metrics.jsonl. Its samples are those that update N trained on. The loss of
step N in metrics.jsonl is the loss on these samples with the weights of step N - 1.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plumbline.launcher.runtime.commands import cli

if TYPE_CHECKING:
    from plumbline.launcher.runtime.inspection.seen import SeenRun, Step

OF_STEP = ("rank", "world_size", "loss")
"""Options that go with --step only."""
OF_LOSS = ("checkpoint", "device")
"""Options that go with --loss only."""


def corpus_or_run(text: str) -> Path:
    """Return the path of a folder, or the prefix of a bare Megatron-LM pair, for argparse."""
    return Path(text) if Path(f"{text}.idx").is_file() else cli.existing(text)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "data", type=corpus_or_run, metavar="CORPUS|RUN", help="corpus, PREFIX of a pair, or run folder"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=cli.positive, metavar="N", help="for a run: the samples that update N trained on")
    what.add_argument("--find", metavar="TEXT", help="documents and training examples that contain this text")
    parser.add_argument("--rank", type=cli.natural, help="with --step: only the samples of this rank")
    parser.add_argument(
        "--world-size", type=cli.positive, help="with --rank: the number of ranks (default: as in the run's last start)"
    )
    parser.add_argument("--loss", action="store_true", help="with --step: the loss of each sample, worst first")
    parser.add_argument(
        "--checkpoint",
        type=cli.existing,
        help="with --loss: checkpoint with the weights (default: the newest before the step)",
    )
    parser.add_argument("--full", action="store_true", help="show all samples, and texts in full")
    cli.add_arithmetic_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document, with all samples of a step")
    arguments = parser.parse_args()
    for names, needed in ((OF_STEP, "step"), (OF_LOSS, "loss")):
        misplaced = [] if getattr(arguments, needed) else cli.given(arguments, names)
        if misplaced:
            parser.error(f"{misplaced[0]} goes with --{needed}: give it, or leave this out")
    if arguments.dtype != parser.get_default("dtype") and not arguments.loss:
        parser.error("--dtype goes with --loss: give it, or leave this out")
    if arguments.full and arguments.find is not None:
        parser.error("--full shows samples in full, and --find none: leave one of them out")
    if arguments.world_size is not None and arguments.rank is None:
        parser.error("--world-size goes with --rank: a step holds the same samples for every number of ranks")
    return arguments


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.data.corpus import open_corpus
from plumbline.launcher.runtime.config.run_files import CONFIG
from plumbline.launcher.runtime.inspection.found import find_in_corpus, find_in_run
from plumbline.launcher.runtime.inspection.sources import tell_corpus, tell_run
from plumbline.launcher.runtime.inspection.text import Answer


def main() -> None:
    """Open the corpus or run, and print the requested data, as facts for programs or lines for people."""
    arguments = parse_arguments()
    if (arguments.data / CONFIG).is_file():
        facts, lines = look_at_run(arguments)
    elif arguments.step is not None:
        raise ValueError(f"--step {arguments.step}: {arguments.data} is no run (no config.yaml), so it has no steps")
    else:
        facts, lines = look_at_corpus(arguments)
    if arguments.json:
        cli.print_json(facts)
        return
    for line in lines:
        print(line)


def look_at_corpus(arguments: argparse.Namespace) -> Answer:
    """Return the contents of a corpus, or the places where it contains a text."""
    corpus = open_corpus(arguments.data)
    if arguments.find is not None:
        return find_in_corpus(corpus, arguments.find, arguments.data)
    return tell_corpus(corpus, arguments.full)


def look_at_run(arguments: argparse.Namespace) -> Answer:
    """Return the data of a run, the samples of one step, or the steps that read a text."""
    from plumbline.launcher.runtime.inspection.seen import SeenRun  # imported here, because a corpus needs no torch
    from plumbline.launcher.runtime.inspection.steps import tell_step

    run = SeenRun(arguments.data)
    if arguments.find is not None:
        return find_in_run(run, arguments.find)
    if arguments.step is None:
        return tell_run(run, arguments.full)
    step = run.step(arguments.step, arguments.rank, arguments.world_size)
    return look_at_losses(arguments, run, step) if arguments.loss else tell_step(run, step, arguments.full)


def look_at_losses(arguments: argparse.Namespace, run: "SeenRun", step: "Step") -> Answer:
    """Open a checkpoint, and return its losses on the samples of a step."""
    from plumbline.launcher.runtime.inspection.losses import checkpoint_before, tell_losses
    from plumbline.launcher.runtime.models.open import DTYPES, device_named, load_model

    folder = arguments.checkpoint or checkpoint_before(run, step.step)
    model = load_model(folder, device_named(arguments.device), DTYPES[arguments.dtype])
    return tell_losses(run, step, model, arguments.full)


if __name__ == "__main__":
    cli.run(main)
