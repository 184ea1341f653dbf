"""Continue texts: prompts from a command line, a file or a person, one after the other or several together."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from os.path import commonprefix
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from plumbline.launcher.runtime.models.facts import ModelFacts
from plumbline.launcher.runtime.models.open import LoadedModel
from plumbline.launcher.runtime.system.log import LOG
from plumbline.model.lookahead.generation import Drafts, Trigger, check_verifiable
from plumbline.model.quantization.precision import scales_over_tokens
from plumbline.model.sampling import Sampling, check_room

USUAL = 100
"""Default number of tokens of a continuation."""


@dataclass(frozen=True)
class Prompt:
    """Hold a text, its token ids for the model, and the seed of its continuation."""

    text: str
    tokens: list[int]
    seed: int


@dataclass(frozen=True)
class Continuation:
    """Hold a model's continuation of a prompt."""

    prompt: str
    seed: int
    text: str
    tokens: list[int]
    ended: bool
    """Whether it ended with the end-of-text token rather than at the token limit."""


@dataclass
class Writer:
    """Continue prompts with one model, and measure the time."""

    model: LoadedModel
    tokenizer: Any
    max_new_tokens: int
    sampling: Sampling
    think: Trigger | Drafts | None
    made: int = field(default=0, init=False)
    """Number of generated tokens."""
    read: int = field(default=0, init=False)
    """Number of prompt tokens."""
    seconds: float = field(default=0.0, init=False)

    def stream(self, prompt: Prompt) -> Iterator[str | Continuation]:
        """Yield the text after a prompt as it is generated, and finally the whole continuation."""
        begun, text, tokens = perf_counter(), TextStream(self.tokenizer, prompt.tokens), list[int]()
        for token in self.model.continuation(prompt.tokens, seed=prompt.seed, think=self.think, **self._options):
            tokens.append(token)
            yield text.add(token)
        yield text.rest()
        self._count([prompt], [tokens], perf_counter() - begun)
        yield self._continuation(prompt, tokens)

    def together(self, prompts: Sequence[Prompt]) -> list[Continuation]:
        """Return the continuations of several prompts, generated in one batch."""
        begun, tokens = perf_counter(), [list[int]() for _ in prompts]
        seeds = [prompt.seed for prompt in prompts]
        for said in self.model.continuations([prompt.tokens for prompt in prompts], seeds=seeds, **self._options):
            for row, token in zip(tokens, said, strict=True):
                row += [] if token is None else [token]
        self._count(prompts, tokens, perf_counter() - begun)
        return [self._continuation(*each) for each in zip(prompts, tokens, strict=True)]

    @property
    def speed(self) -> dict[str, float]:
        """Return how much was read and generated in how many seconds, without loading."""
        return {
            "prompt_tokens": self.read,
            "new_tokens": self.made,
            "seconds": self.seconds,
            "tokens_per_second": self.made / self.seconds,
        }

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling,
            "stop_at": self.tokenizer.eos_token_id,
        }

    def _continuation(self, prompt: Prompt, tokens: list[int]) -> Continuation:
        text = text_after(self.tokenizer, prompt.tokens, tokens)
        return Continuation(prompt.text, prompt.seed, text, tokens, tokens[-1:] == [self.tokenizer.eos_token_id])

    def _count(self, prompts: Sequence[Prompt], tokens: Sequence[list[int]], seconds: float) -> None:
        self.read += sum(len(prompt.tokens) for prompt in prompts)
        self.made += sum(map(len, tokens))
        self.seconds += seconds


class TextStream:
    """Decode the tokens after a prompt incrementally, at a cost that does not grow with the text."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._given = len(prompt)  # number of tokens whose text was already returned

    def add(self, token: int) -> str:
        """Return the text that a token adds, or "" while it ends in the middle of a character."""
        self._tokens.append(token)
        more = self.rest()
        if not more or more.endswith("\ufffd"):
            return ""
        # Keep the last piece, since the text of a token may depend on the one before it
        self._tokens, self._given = self._tokens[self._given :], len(self._tokens) - self._given
        return more

    def rest(self) -> str:
        """Return the text that was not returned yet.

        Decoded alone, tokens may lose their first space, as with Llama-2 and Mistral. A character that the tokens
        before leave incomplete counts as not returned.
        """
        tokens = self._tokens[self._given :]
        before, whole = map(self._decode, (self._tokens[: self._given], self._tokens))
        more = whole[len(commonprefix([before, whole])) :]  # noqa: RUF071 - of characters, not of paths
        # Byte fallback decodes a run of bytes as a whole: half a character also spoils those before it
        return self._decode(tokens) if more.startswith("\ufffd") and len(before) + len(more) > len(whole) else more

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def text_after(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that tokens add to the text of those before them, as `TextStream`; special tokens add none."""
    stream = TextStream(tokenizer, before)
    return "".join([*map(stream.add, tokens), stream.rest()])


def tokens_of(tokenizer: Any, text: str) -> list[Any]:
    """Return the token ids of a text at the beginning of a document, or [None] if there are none.

    That is what the tokenizer itself puts before a text: Llama's <s> begins every document of a corpus, too, and OPT's
    </s> ends the one before.

    Raises:
        ValueError: it is not valid Unicode, like some bytes of a command line or a lone surrogate in JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {_shown(text)}: is no valid Unicode text ({error.reason})") from error
    marked = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(marked["input_ids"], marked["special_tokens_mask"], strict=True)
    own = [token for token, _ in takewhile(itemgetter(1), pairs)]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if tokens[: len(own)] != own:
        tokens = [*own, *tokens]
    return tokens or [tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id]


def usual_length(facts: ModelFacts, tokenizer: Any, texts: Sequence[str]) -> int:
    """Return the default number of new tokens after prompts; without prompts, at most half a context."""
    if facts.context_length is None:
        return USUAL
    longest = max((len(tokens_of(tokenizer, text)) for text in texts), default=facts.context_length // 2)
    return max(1, min(USUAL, facts.context_length - longest))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def encode(facts: ModelFacts, tokenizer: Any, text: str, seed: int, max_new_tokens: int) -> Prompt:
    """Return a prompt as the model reads it; an empty text begins a document.

    Raises:
        ValueError: it does not fit the model, or the tokenizer has no token to begin a document with.
    """
    tokens = tokens_of(tokenizer, text)
    if tokens == [None]:
        raise ValueError(f"{facts.path}: its tokenizer has neither eos_token nor bos_token, so give a prompt")
    shown = _shown(text)
    try:
        check_room(facts.context_length, len(tokens), max_new_tokens)
    except ValueError as error:
        raise ValueError(f"prompt {shown}: {error}") from error
    if max(tokens) >= facts.vocab_size:
        raise ValueError(
            f"prompt {shown}: has token {max(tokens)}, and {facts.path} knows ids below {facts.vocab_size} only: its "
            "tokenizer is that of another model"
        )
    return Prompt(text, tokens, seed)


def read_prompts(file: str) -> list[str]:
    """Return the prompts of a file ("-" for standard input): one per line, or the `prompt` of each JSON line.

    Raises:
        ValueError: it has none, a line is not a prompt, or it is not UTF-8.
    """
    try:
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {file}: is not UTF-8 text ({error})") from error
    numbered = enumerate(text.replace("\r\n", "\n").split("\n"), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {file}: holds no prompt; write one a line")
    return [_prompt_of(file, *line) for line in lines] if file.endswith(".jsonl") else [line for _, line in lines]


def _prompt_of(file: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f'--prompts {file}:{number}: expected an object such as {{"prompt": "..."}}') from error
    if not isinstance(prompt, str):
        raise ValueError(f"--prompts {file}:{number}: prompt is no text but {prompt!r}")
    return prompt


def alike(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Return the indices of prompts in batches of at most `size`, grouped by similar length."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].tokens))
    return [order[first : first + size] for first in range(0, len(order), size)]


def read_think(text: str, temperature: float) -> Trigger | Drafts | None:
    """Parse `--think`: a trigger, verified drafts, or None for never.

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


def check_rounding(module: nn.Module, think: Trigger | Drafts | None, batch_size: int) -> None:
    """Refuse verification, and warn of batches, if other tokens change how a token is rounded.

    Raises:
        ValueError: see `check_verifiable`.
    """
    if isinstance(think, Drafts):
        check_verifiable(module)
    shared = scales_over_tokens(module)
    if batch_size > 1 and shared:
        LOG.warning(
            f"--batch-size {batch_size}: with {', '.join(shared)} the rows of a batch share scales, so they say other "
            "things together than alone; --batch-size 1 keeps them apart"
        )
