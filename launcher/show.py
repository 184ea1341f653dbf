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
from pathlib import Path
from typing import TYPE_CHECKING

from plumbline.launcher.runtime.system import cli

if TYPE_CHECKING:
    from plumbline.launcher.runtime.inspection.seen import SeenRun, Step

OF_STEP = ("rank", "world_size", "loss")
"""Options that go with --step only."""
OF_LOSS = ("checkpoint",)
"""Options that go with --loss only."""


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


from plumbline.data.corpus import open_corpus
from plumbline.launcher.runtime.inspection.found import find_in_corpus, find_in_run
from plumbline.launcher.runtime.inspection.sources import tell_corpus, tell_run
from plumbline.launcher.runtime.inspection.text import Answer


def main() -> None:
    """Open what was named, and print what was asked for: facts for programs or lines for people."""
    arguments = parse_arguments()
    if (arguments.data / "config.yaml").is_file():
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
    """Return what a corpus holds, or where it holds a text."""
    corpus = open_corpus(arguments.data)
    if arguments.find is not None:
        return find_in_corpus(corpus, arguments.find, arguments.data)
    return tell_corpus(corpus, arguments.full)


def look_at_run(arguments: argparse.Namespace) -> Answer:
    """Return what a run reads, a step of it, or the steps that read a text."""
    from plumbline.launcher.runtime.inspection.seen import SeenRun  # of a corpus alone, torch is not needed
    from plumbline.launcher.runtime.inspection.steps import tell_step

    run = SeenRun(arguments.data)
    if arguments.find is not None:
        return find_in_run(run, arguments.find)
    if arguments.step is None:
        return tell_run(run, arguments.full)
    step = run.step(arguments.step, arguments.rank, arguments.world_size)
    return look_at_losses(arguments, run, step) if arguments.loss else tell_step(run, step, arguments.full)


def look_at_losses(arguments: argparse.Namespace, run: "SeenRun", step: "Step") -> Answer:
    """Open a checkpoint, and return what it scores on the samples of a step."""
    from plumbline.launcher.runtime.inspection.losses import checkpoint_before, tell_losses
    from plumbline.launcher.runtime.models.open import DTYPES, device_named, load_model

    folder = arguments.checkpoint or checkpoint_before(run, step.step)
    model = load_model(folder, device_named(arguments.device), DTYPES[arguments.dtype])
    return tell_losses(run, step, model, arguments.full)


if __name__ == "__main__":
    cli.run(main)
