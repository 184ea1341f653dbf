# PYTHON_ARGCOMPLETE_OK
r"""Score a model on held-out text (loss, perplexity, bits per byte), a synthetic task (exact match) or lm_eval's tasks.

python launcher/eval.py --model runs/quickstart --data corpora/stdlib
python launcher/eval.py --model exports/quickstart --data corpora/stdlib --json     # a Hugging Face folder
python launcher/eval.py --model runs/quickstart --text book.txt     # "-" is standard input
python launcher/eval.py --model runs/quickstart --data corpora/stdlib --average last:2   # mean of two checkpoints
python launcher/eval.py --model runs/addition --task '{name: addition, digits: 3, seed: 1}'     # exact match
python launcher/eval.py --model runs/star_graph_lookahead --task star_graph --thinking     # a task of the run itself
python launcher/eval.py --model runs/maze --task maze --shuffle-questions     # without the right question
python launcher/eval.py --model runs/quickstart --tasks held_out --task-folder configs/harness     # docs/harness.md
"""

import argparse

from plumbline.launcher.runtime.commands import cli

OF_TASKS = ("task_folder", "num_fewshot", "limit", "bootstrap")
"""Options that go with --tasks only."""
NOT_OF_TASKS = ("thinking", "shuffle_questions", "sequence_length", "max_batches")
"""Options that do not go with --tasks."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", type=cli.model, required=True, help=cli.MODEL)
    parser.add_argument("--average", help=cli.AVERAGE)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", help="corpus; its held-out split is scored")
    data.add_argument(
        "--text",
        type=cli.existing_or_stdin,
        metavar="FILE",
        help="text to score, read by the model's tokenizer: any input of prepare.py --source, or - for standard input",
    )
    data.add_argument(
        "--task",
        help="a synthetic task of Plumbline, instead of a corpus: as YAML, '{name: addition, digits: 3}', or for a "
        "task that the run was evaluated on, its NAME in eval/NAME/loss",
    )
    data.add_argument(
        "--tasks",
        metavar="NAME[,NAME]",
        help="tasks of lm-evaluation-harness by name: its own (hellaswag, ...), or those of --task-folder",
    )
    parser.add_argument(
        "--task-folder",
        type=cli.existing,
        action="append",
        metavar="DIR",
        help="with --tasks: a folder with your own tasks as YAML files, and the code they refer to; may be repeated",
    )
    parser.add_argument(
        "--num-fewshot", type=int, help="with --tasks: examples before a question (default: as in the task)"
    )
    parser.add_argument("--limit", type=cli.positive, help="with --tasks: score only the first N documents of each")
    parser.add_argument(
        "--bootstrap",
        type=cli.positive,
        metavar="N",
        help="with --tasks: print standard errors: by formula for means, else from N resamples (default: none)",
    )
    parser.add_argument(
        "--shuffle-questions",
        action="store_true",
        help="with a task: replace each question but keep its answer, so that a model that reads the question fails",
    )
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="for a run whose objective thinks: predict tokens after the anchors of its anchor_policy with thoughts",
    )
    parser.add_argument(
        "--sequence-length",
        type=cli.positive,
        help="tokens per window (default: as in training; for a Hugging Face folder its context, at most 1024)",
    )
    parser.add_argument(
        "--batch-size", type=cli.positive, default=8, help="windows, or sequences of --tasks, per forward pass"
    )
    parser.add_argument(
        "--max-batches", type=cli.positive, help="score only this many batches, evenly spread (default: everything)"
    )
    cli.add_arithmetic_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    check_options(parser, arguments)
    return arguments


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse an empty name, and options that do not apply to what is scored; the error says where they belong."""
    for name in ("data", "task", "tasks"):
        if getattr(arguments, name) == "":
            parser.error(f"--{name}: is empty, as a shell leaves it of a variable that is not set: give a name")
    ours = "--data, --text or --task"
    wrong, right, names = ("--tasks", ours, NOT_OF_TASKS) if arguments.tasks else (ours, "--tasks", OF_TASKS)
    if misplaced := cli.given(arguments, names):
        parser.error(f"{misplaced[0]} does not go with {wrong}: leave it out, or give {right}")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        parser.error(f"--num-fewshot {arguments.num_fewshot}: 0 is none, more are examples before each question")


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.data.loader import ValidationBatches
from plumbline.data.opening import open_source
from plumbline.data.streams import SampleSource
from plumbline.data.tasks.source import TaskStream
from plumbline.launcher.runtime.commands.progress import watched
from plumbline.launcher.runtime.config.stock import model_folder
from plumbline.launcher.runtime.harness import tasks as harness_tasks
from plumbline.launcher.runtime.models.facts import model_facts, outline
from plumbline.launcher.runtime.models.held_out import (
    check_tokenizer,
    check_vocabulary,
    held_out,
    open_data,
    own_task,
    prepared_text,
    read_task,
    window_length,
)
from plumbline.launcher.runtime.models.open import DTYPES, LoadedModel, device_named, load_model, load_tokenizer
from plumbline.launcher.runtime.scoring.scores import HeldOutLoss, held_out_loss


def main() -> None:
    """Score the model on the requested data."""
    arguments = parse_arguments()
    arguments.model = model_folder(arguments.model)
    if arguments.tasks:
        score_tasks(arguments)
    elif arguments.text:
        with prepared_text(arguments.text, model_facts(arguments.model).tokenizer) as text:
            score_held_out(arguments, text)
    elif arguments.data:
        score_held_out(arguments, open_data(arguments.data, arguments.model))
    else:
        asked = read_task(arguments.task)
        score_held_out(arguments, None if asked is None else open_source(asked))


def score_tasks(arguments: argparse.Namespace) -> None:
    """Find lm_eval's tasks, load the model, score, print."""
    names = [name.strip() for name in arguments.tasks.split(",")]
    tasks = harness_tasks.find_tasks(names, arguments.task_folder or [])
    model = load_model(arguments.model, device_named(arguments.device), DTYPES[arguments.dtype], arguments.average)
    if model.tokenizer_path is None:
        raise ValueError(f"{model.source}: has no tokenizer, so the text of --tasks cannot be turned into tokens")
    model.warn_without_thoughts()
    scores = harness_tasks.score_tasks(
        model,
        load_tokenizer(model.tokenizer_path),
        tasks,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        bootstrap=arguments.bootstrap or 0,
    )
    facts = {"model": str(model.source), "average": model.average, "limit": arguments.limit, **scores}
    if arguments.json:
        cli.print_json(facts)
        return
    average = f", {model.average}" if model.average else ""
    print(f"{model.source}{average}, lm_eval {scores['lm_eval']}")
    for line in harness_tasks.lines(scores):
        print(line)
    if not arguments.bootstrap:
        print("no standard errors: ask for them with --bootstrap 1000")


def score_held_out(arguments: argparse.Namespace, corpus: SampleSource | None) -> None:
    """Check that the data fits the model, load it, score, print; without a corpus, use the run's task of this name."""
    shape = outline(arguments.model)  # what does not fit is refused before weights are read
    if corpus is None:
        corpus = open_source(own_task(shape, arguments.task))
    (check_vocabulary if arguments.text else check_tokenizer)(shape, corpus)
    length = window_length(shape, arguments.sequence_length)
    model = load_model(
        arguments.model,
        device_named(arguments.device),
        DTYPES[arguments.dtype],
        arguments.average,
        with_objective=arguments.thinking,
    )
    if arguments.thinking and not model.thinks:
        raise ValueError(
            f"--thinking: {model.source} is no run whose objective thinks (latent_lookahead, pause, coconut); of an "
            "exported folder, give the run that it comes from"
        )
    if not arguments.thinking:
        model.warn_without_thoughts(": --thinking scores what was")
    split = held_out(corpus, arguments.shuffle_questions)
    batches = ValidationBatches(split, length, arguments.batch_size, arguments.max_batches, vocab_size=model.vocab_size)
    scores = held_out_loss(model, watched(batches, len(batches), "batch"), split, arguments.thinking)
    report(arguments, model, corpus, length, scores)


def report(
    arguments: argparse.Namespace, model: LoadedModel, corpus: SampleSource, length: int, scores: HeldOutLoss
) -> None:
    """Print the scores for people or programs."""
    facts: dict[str, object] = {
        "model": str(model.source),
        "average": model.average,
        "data": str(corpus),
        "sequence_length": length,
        "thinking": arguments.thinking,
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "bits_per_byte": scores.bits_per_byte,
        "tokens": scores.tokens,
    }
    if isinstance(corpus.held_out, TaskStream):
        facts |= {
            "task": corpus.held_out.task.model_dump(),
            "shuffled_questions": arguments.shuffle_questions,
            "examples": scores.examples,
            "exact_match": scores.exact_match,
            "exact_match_interval": scores.exact_match_interval,
            "accuracy": scores.accuracy,
            **scores.own_means,
        }
    if arguments.json:
        cli.print_json(facts)
        return
    for name, value in facts.items():
        if value is not None and value is not False:  # not requested
            print(f"{name:<20} {in_words(value)}")


def in_words(value: object) -> str:
    """Return a value as text: fractions with four decimals, an interval in brackets, a dictionary as a list."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(entry)}" for key, entry in value.items())
    if isinstance(value, tuple):
        return f"[{', '.join(in_words(end) for end in value)}]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    cli.run(main)
