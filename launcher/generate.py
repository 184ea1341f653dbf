# PYTHON_ARGCOMPLETE_OK
"""Continue prompts with a trained model.

python launcher/generate.py --model runs/quickstart --prompt "def main("
python launcher/generate.py --model exports/quickstart --prompt "import " --temperature 0     # greedy
python launcher/generate.py --model runs/quickstart --interactive     # each line is a prompt, until Ctrl-D
python launcher/generate.py --model runs/quickstart --prompts prompts.txt --batch-size 8     # "-" is standard input
python launcher/generate.py --model runs/lookahead --prompt "def " --think every:8     # docs/lookahead.md
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

from plumbline.launcher.runtime.commands import cli
from plumbline.model.sampling import Sampling

OPTIONS = ("think", "temperature", "top_k", "top_p", "max_new_tokens", "seed")
"""Options that --json repeats."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", type=cli.model, required=True, help=cli.MODEL)
    parser.add_argument("--average", help=cli.AVERAGE)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    prompts.add_argument(
        "--prompts",
        type=cli.existing_or_stdin,
        metavar="FILE",
        help='file with one prompt per line, or in a .jsonl file one object {"prompt": "..."}; - is standard input',
    )
    prompts.add_argument("--interactive", action="store_true", help="ask for prompts; Ctrl-C ends a continuation")
    parser.add_argument(
        "--max-new-tokens",
        type=cli.positive,
        help="length of the continuation (default: 100, or less if the longest prompt leaves less of the context)",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=cli.positive, help="draw only from the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, help="draw only from the likeliest tokens whose probabilities add up to this"
    )
    parser.add_argument(
        "--think",
        default="never",
        help="for a model trained with latent lookahead, when to think: never, first, every:TOKENS, probability:P, "
        "entropy:NATS; or verify: greedy decoding of drafts from thoughts, which the model verifies",
    )
    parser.add_argument("--samples", type=cli.positive, default=1, help="number of continuations of each prompt")
    parser.add_argument("--seed", type=cli.seed, default=0, help="the same seed draws the same text")
    parser.add_argument(
        "--batch-size",
        type=cli.positive,
        default=1,
        help="continuations to generate together (default: 1, printed as it is drawn)",
    )
    cli.add_arithmetic_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    check_options(parser, arguments)
    return arguments


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse values outside their range, and options that do not go together."""
    try:
        arguments.sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    except ValueError as error:
        parser.error(f"--{str(error).replace('_', '-', 1)}")
    drawing = {"--samples": arguments.samples > 1, "--top-k": arguments.top_k, "--top-p": arguments.top_p}
    idle = [name for name, value in drawing.items() if value]
    if arguments.temperature == 0 and idle:
        parser.error(f"--temperature 0 is greedy, and says one thing only: leave out {' and '.join(idle)}")
    if arguments.interactive and (arguments.json or arguments.batch_size > 1):
        parser.error("--interactive answers one prompt at a time, as text: leave out --json and --batch-size")
    if arguments.think != "never" and arguments.batch_size > 1:
        parser.error(f"--think {arguments.think} is for one sequence at a time: leave out --batch-size")


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.launcher.runtime.commands.interrupts import interrupts
from plumbline.launcher.runtime.config.stock import model_folder
from plumbline.launcher.runtime.models.continuing import (
    Continuation,
    Prompt,
    Writer,
    alike,
    check_rounding,
    encode,
    read_prompts,
    read_think,
    usual_length,
)
from plumbline.launcher.runtime.models.facts import ModelFacts, model_facts
from plumbline.launcher.runtime.models.open import (
    DTYPES,
    device_named,
    load_model,
    load_tokenizer,
    refuse_own_thinker,
)
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.lookahead.generation import Drafts


def main() -> None:
    """Check everything that needs no weights, load them, and continue the prompts."""
    arguments = parse_arguments()
    think = read_think(arguments.think, arguments.temperature)
    arguments.model = model_folder(arguments.model)
    if think is not None:
        refuse_own_thinker(arguments.model)
    facts = model_facts(arguments.model)
    tokenizer = load_tokenizer(facts.tokenizer)
    given = read_prompts(arguments.prompts) if arguments.prompts else [arguments.prompt]
    texts = [] if arguments.interactive else given
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = usual_length(facts, tokenizer, texts)
    prompts = [prompt for text in texts for prompt in samples(arguments, facts, tokenizer, text)]
    model = load_model(
        arguments.model,
        device_named(arguments.device),
        DTYPES[arguments.dtype],
        arguments.average,
        with_objective=think is not None,
    )
    if think is not None:
        _ = model.decoding  # raises now, before anything is printed, if the model cannot think
    if think is None or isinstance(think, Drafts):  # drafts are verified by the plain model
        model.warn_without_thoughts()
    check_rounding(model.module, think, arguments.batch_size)
    writer = Writer(model, tokenizer, arguments.max_new_tokens, arguments.sampling, think)
    if arguments.interactive:
        converse(arguments, facts, writer)
        return
    said = (
        in_batches(arguments, writer, prompts) if arguments.batch_size > 1 else one_by_one(arguments, writer, prompts)
    )
    if arguments.json:
        report = {"model": str(model.source), "average": model.average}
        report |= {name: getattr(arguments, name) for name in OPTIONS}
        report |= asdict(think) if isinstance(think, Drafts) else {}
        cli.print_json({**report, "samples": [asdict(each) for each in said], "speed": writer.speed})
    else:
        tell_speed(writer)


def samples(arguments: argparse.Namespace, facts: ModelFacts, tokenizer: object, text: str) -> list[Prompt]:
    """Return one prompt for each continuation of a text; they differ in their seeds."""
    first = encode(facts, tokenizer, text, arguments.seed, arguments.max_new_tokens)
    return [replace(first, seed=first.seed + number) for number in range(arguments.samples)]


def one_by_one(arguments: argparse.Namespace, writer: Writer, prompts: list[Prompt]) -> list[Continuation]:
    """Continue prompts in turn, and print each as it is drawn."""
    said = []
    for number, prompt in enumerate(prompts):
        if not arguments.json:
            print(opening(arguments, prompt), end="", flush=True)
        for piece in writer.stream(prompt):
            if isinstance(piece, Continuation):
                said.append(piece)
            elif not arguments.json:
                print(piece, end="", flush=True)
        if not arguments.json:
            print("\n" if number + 1 < len(prompts) else "")
    return said


def in_batches(arguments: argparse.Namespace, writer: Writer, prompts: list[Prompt]) -> list[Continuation]:
    """Continue several prompts at a time, and print each once it and all earlier ones are finished."""
    said: dict[int, Continuation] = {}
    printed = 0
    for numbers in alike(prompts, arguments.batch_size):
        together = writer.together([prompts[number] for number in numbers])
        said.update(zip(numbers, together, strict=True))
        while printed in said and not arguments.json:
            end = "\n\n" if printed + 1 < len(prompts) else "\n"
            print(opening(arguments, prompts[printed]) + said[printed].text, end=end, flush=True)
            printed += 1
    return [said[number] for number in range(len(prompts))]


def opening(arguments: argparse.Namespace, prompt: Prompt) -> str:
    """Return the text before a continuation: its prompt, after a heading if there are several continuations."""
    facts = [repr(prompt.text)] if arguments.prompts else []
    if arguments.samples > 1:
        facts += [f"sample {prompt.seed - arguments.seed + 1}", f"seed {prompt.seed}"]
    return f"=== {', '.join(facts)}\n{prompt.text}" if facts else prompt.text


def converse(arguments: argparse.Namespace, facts: ModelFacts, writer: Writer) -> None:
    """Continue each typed line, with its own seeds; for a line that cannot be continued, log the reason."""
    for number, line in enumerate(typed_lines()):
        try:
            own = argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + number * arguments.samples})
            one_by_one(own, writer, samples(own, facts, writer.tokenizer, line))
        except ValueError as error:
            LOG.error(error)
        except KeyboardInterrupt:
            print()
            interrupts().answered()
    if writer.made:
        tell_speed(writer)


def typed_lines() -> Iterator[str]:
    """Yield lines until the end of standard input; on a terminal ask for each."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - lines can be edited, and earlier ones recalled
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def tell_speed(writer: Writer) -> None:
    """Log the number of tokens and the time, and for verified drafts how many were right."""
    if isinstance(writer.think, Drafts):
        passes = f"{writer.think.text_passes} passes of text and {writer.think.slot_passes} of slots"
        LOG.info(f"{writer.think.accepted} of {writer.think.drafted} drafted tokens right; {passes}")
    speed = writer.speed
    LOG.info(
        f"{speed['prompt_tokens']} tokens read and {speed['new_tokens']} written in {speed['seconds']:.2f} s: "
        f"{speed['tokens_per_second']:,.1f} tokens per second"
    )


if __name__ == "__main__":
    cli.run(main)
