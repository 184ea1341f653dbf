"""Continue a prompt with a trained model.

python launcher/generate.py --model runs/quickstart --prompt "def main("
python launcher/generate.py --model exports/quickstart --prompt "import " --temperature 0     # greedy
python launcher/generate.py --model runs/lookahead --prompt "def " --think every:8     # docs/lookahead.md
"""

import argparse
import re
from dataclasses import asdict
from itertools import chain, islice

from plumbline.launcher.runtime.system import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=cli.existing, required=True, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--average", help=cli.AVERAGE)
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--max-new-tokens", type=cli.positive, default=100, help="length of the continuation")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=cli.positive, help="draw from the k likeliest tokens only")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that hold this much probability")
    parser.add_argument(
        "--think",
        default="never",
        help="of a model trained with latent lookahead, when to think: never, first, every:TOKENS, probability:P, "
        "entropy:NATS; verify: greedy, with drafts of thoughts that the model checks",
    )
    parser.add_argument("--samples", type=cli.positive, default=1, help="number of continuations")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text")
    cli.add_arithmetic_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


if __name__ == "__main__":
    parse_arguments()  # ahead of the imports below, which take seconds: --help and mistakes are answered at once


from plumbline.launcher.runtime.models.open import DTYPES, device_named, load_model, load_tokenizer
from plumbline.model.lookahead.generation import Drafts, Trigger


def main() -> None:
    """Load, encode, print text as it is drawn."""
    arguments = parse_arguments()
    if arguments.temperature < 0:
        raise ValueError(f"--temperature {arguments.temperature}: 0 is greedy, larger is more random")
    think = read_think(arguments.think, arguments.temperature)
    model = load_model(
        arguments.model,
        device_named(arguments.device),
        DTYPES[arguments.dtype],
        arguments.average,
        with_objective=think is not None,
    )
    if think is not None:
        _ = model.decoding  # raises now, before anything is printed, if the model cannot think
    if model.tokenizer_path is None:
        raise ValueError(
            f"{model.source}: has no tokenizer, so text cannot be turned into tokens; a model of a task is scored by "
            "launcher/eval.py --task"
        )
    tokenizer = load_tokenizer(model.tokenizer_path)
    prompt = tokenizer.encode(arguments.prompt, add_special_tokens=False) or [tokenizer.eos_token_id]
    samples = []
    for number in range(arguments.samples):
        stream = model.continuation(
            prompt,
            arguments.max_new_tokens,
            think=think,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed + number,
            stop_at=tokenizer.eos_token_id,
        )
        tokens: list[int] = []
        printed = ""
        first = list(islice(stream, 1))  # raises, if the request is impossible, before anything is printed
        if not arguments.json:
            print(arguments.prompt, end="", flush=True)
        for token in chain(first, stream):
            tokens.append(token)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            # A character may span several tokens, and decodes to U+FFFD until its last one is there
            if not arguments.json and not text.endswith("\ufffd"):
                print(text[len(printed) :], end="", flush=True)
                printed = text
        samples.append({"text": tokenizer.decode(tokens, skip_special_tokens=True), "tokens": tokens})
        if not arguments.json:
            print("\n" if number + 1 < arguments.samples else "")
    if arguments.json:
        keys = ("think", "temperature", "top_k", "top_p", "seed")
        facts = {"model": str(model.source), "average": model.average} | {key: getattr(arguments, key) for key in keys}
        if isinstance(think, Drafts):
            facts |= asdict(think)
        cli.print_json({**facts, "prompt": arguments.prompt, "samples": samples})
    elif isinstance(think, Drafts):
        made = sum(len(sample["tokens"]) for sample in samples)
        passes = f"{think.text_passes} passes of text and {think.slot_passes} of slots for {made} tokens"
        print(f"\n{think.accepted} of {think.drafted} drafted tokens right; {passes}")


def read_think(text: str, temperature: float) -> Trigger | Drafts | None:
    """Return when to think by what `--think` says: a trigger, verified drafts, or None for never.

    Raises:
        ValueError: it is none of the known forms.
    """
    if text == "never":
        return None
    if text == "verify":
        if temperature:
            raise ValueError(f"--think verify checks greedy drafts: add --temperature 0 (it is {temperature})")
        return Drafts()
    if text == "first":
        return Trigger("first")
    form = re.fullmatch(r"(every|probability|entropy):(\d+|\d*\.\d+)", text)
    kind, value = (form[1], float(form[2])) if form else ("", 0.0)
    if kind == "every" and value >= 1 and value.is_integer():
        return Trigger("every", value)
    if kind == "probability" and value <= 1:
        return Trigger("probability", value)
    if kind == "entropy":
        return Trigger("entropy", value)
    raise ValueError(
        f"--think {text}: it is never, first, every:TOKENS (a whole number from 1), probability:P (0 to 1), "
        "entropy:NATS (from 0) or verify"
    )


if __name__ == "__main__":
    cli.run(main)
