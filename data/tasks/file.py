r"""Read a task from a file of JSON Lines: a prompt and an answer in each, turned into tokens by any tokenizer.

{"prompt": "2 + 3 =", "answer": "5"}        2 + 3 =\n [5 <|endoftext|>]
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt, field_validator

from plumbline.data.indexed import Int64s, Integers
from plumbline.data.order import derive_key
from plumbline.data.paths import HomePath
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import Example, SplitName, TaskConfig, answering
from plumbline.data.tokenizer_making import tokenizer_folder, trained_size
from plumbline.data.tokenizers import Encoder, tokenizer_sha256

LOG = logging.getLogger(__name__)

OTHERS = 64
"""Other prompts that are tried for another question."""


class FileConfig(TaskConfig):
    """Configure the examples of one file, all of them to train on or all of them to evaluate on.

    Labels are on the answer and the end-of-text token behind it.
    """

    name: Literal["file"] = "file"
    """Which task."""
    path: HomePath
    """The file: an object of JSON in each line; blank lines are passed over."""
    tokenizer: HomePath = "byte"
    """byte, a folder with a tokenizer (corpora/NAME/tokenizer is that of a corpus), or hf:NAME."""
    prompt_key: str = "prompt"
    """Key of the text that is read."""
    answer_key: str = "answer"
    """Key of the text that is to be said."""
    template: str = "{prompt}\n{answer}"
    """How an example is written: all that stands before {answer} is read, the rest is to be said."""
    max_tokens: PositiveInt | None = None
    """Examples of more tokens are left out, and counted in a line of the log; null: all are kept, and a sequence too
    short for one of them is an error."""

    holds_out: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: str) -> str:
        if trained_size(tokenizer) is not None:
            raise ValueError(f"tokenizer = {tokenizer}: is not trained on a task; give byte, a folder or hf:NAME")
        return tokenizer

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        before, _, after = template.partition("{answer}")
        if before.count("{prompt}") != 1 or "{prompt}" in after or template.count("{answer}") != 1:
            raise ValueError(f"template = {template!r}: give {{prompt}} once and, behind it, {{answer}} once")
        return template

    @property
    def tokenizer_folder(self) -> Path:
        """Return the folder of the tokenizer.

        Raises:
            ValueError: there is none, or it cannot be used.
        """
        try:
            return tokenizer_folder(self.tokenizer)
        except (ValueError, ConnectionError) as error:
            reason = str(error).removeprefix(f"--tokenizer {self.tokenizer}: ")
            raise ValueError(f"{self.path}: task.tokenizer = {self.tokenizer}: {reason}") from error

    @property
    def vocab_size(self) -> int:
        """Return the number of ids of the tokenizer."""
        return Encoder(self.tokenizer_folder, self.tokenizer).vocab_size

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest example; its last answer is not read."""
        return int(read(self).lengths.max())

    def too_short(self, length: int) -> str:
        """Say why samples of `length` tokens are too short: which line has the longest example."""
        examples = read(self)
        line = examples.lines[int(examples.lengths.argmax())]
        return (
            f"data.sequence_length {length} is too short for {self.path}, line {line}, which has {self.longest} "
            f"tokens; set it to {self.longest} or more, or leave longer examples out with task.max_tokens = {length}"
        )

    @property
    def fingerprint(self) -> str:
        """Return sixteen hex digits: a hash of the keys, of what the file holds and of the tokenizer."""
        settings = self.model_dump(exclude={"path", "tokenizer"}, exclude_none=True)
        return f"{derive_key(settings, read(self).digest, tokenizer_sha256(self.tokenizer_folder)):016x}"

    def num_examples(self, _split: SplitName) -> int:
        """Return the number of examples of the file that are kept."""
        return len(read(self).lines)

    def example(self, _split: SplitName, number: int) -> Example:
        """Return example `number` of the file, which is in either split."""
        return _example(*read(self).parts(number))

    def ask_otherwise(self, tokens: Int64s, _draws: Draws) -> Int64s:
        """Return the tokens as they are: they do not tell what else could be asked, see `with_another_question`."""
        return tokens

    def with_another_question(self, split: SplitName, number: int) -> Example:
        """Return example `number` with its own answer behind the prompt of another one, where one fits."""
        examples = read(self)
        prompt, answer = examples.parts(number)
        draws, room = Draws(derive_key("another question", self.name, self.seed, split, number)), self.longest
        for other in draws.integers(OTHERS, len(examples.lines)).tolist():
            asked, _ = examples.parts(other)
            if len(asked) + len(answer) - 1 <= room and not np.array_equal(asked, prompt):
                return _example(asked, answer)
        return _example(prompt, answer)


@dataclass(frozen=True)
class FileExamples:
    """Hold the examples of a file, n of them."""

    tokens: Integers
    """All sequences end to end, each a prompt and an answer."""
    starts: Int64s
    """[n + 1]: where each begins in `tokens`."""
    prompts: Int64s
    """[n]: tokens of each prompt."""
    lines: Int64s
    """[n]: the line that each stands in, from 1."""
    digest: str
    """Hash of the file's bytes."""

    @property
    def lengths(self) -> Int64s:
        """Return the tokens [n] that each takes of a sample: all but the last one, which is only predicted."""
        return np.diff(self.starts) - 1

    def parts(self, number: int) -> tuple[Integers, Integers]:
        """Return the prompt and the answer of example `number`."""
        sequence = self.tokens[self.starts[number] : self.starts[number + 1]]
        prompt = int(self.prompts[number])
        return sequence[:prompt], sequence[prompt:]


def _example(prompt: Integers, answer: Integers) -> Example:
    sequence = np.concatenate((prompt, answer)).astype(np.int64)
    return answering(sequence, np.arange(len(sequence)) >= len(prompt))


@cache
def read(task: FileConfig) -> FileExamples:
    """Read the file of a task, once in a process: what a run trains on cannot change under it.

    Raises:
        ValueError: the file is not there, or a line is not in the format; the message names it and its field.
    """
    try:
        content = Path(task.path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{task.path}: cannot be read ({error.strerror}); give task.path a file of JSON Lines"
        ) from error
    encoder = Encoder(task.tokenizer_folder, task.tokenizer)
    before, _, after = task.template.partition("{answer}")
    sequences: list[Integers] = []
    prompts, lines = [], []
    longer = 0
    for line, prompt, answer in _texts(task, content):
        asked = encoder.encode(before.replace("{prompt}", prompt), ends=False)
        said = encoder.encode(answer + after, begins=False)
        if not len(asked):
            raise _malformed(task, line, f"{task.prompt_key}: nothing to read before the answer")
        if task.max_tokens is not None and len(asked) + len(said) - 1 > task.max_tokens:
            longer += 1
            continue
        sequences.append(np.concatenate((asked, said)))
        prompts.append(len(asked))
        lines.append(line)
    if not sequences:
        raise ValueError(
            f"{task.path}: no examples"
            + (f" of max_tokens = {task.max_tokens} or fewer, {longer} longer ones; raise it" if longer else "")
        )
    if longer:
        LOG.info(f"{task.path}: {longer:,} of {longer + len(lines):,} examples left out, longer than max_tokens")
    starts = np.cumsum([0, *map(len, sequences)])
    digest = blake2b(content, digest_size=8).hexdigest()
    return FileExamples(np.concatenate(sequences), starts, np.array(prompts), np.array(lines), digest)


def _texts(task: FileConfig, content: bytes) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the prompt and the answer of each example."""
    for line, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            entry: Any = json.loads(text)
        except ValueError as error:
            raise _malformed(task, line, f"not JSON ({error})") from error
        if not isinstance(entry, dict):
            raise _malformed(task, line, f"a {type(entry).__name__}, not an object")
        for key in (task.prompt_key, task.answer_key):
            if not isinstance(entry.get(key), str):
                found = (
                    f"{json.dumps(entry[key])[:40]} is no text" if key in entry else f"missing; there are {[*entry]}"
                )
                raise _malformed(task, line, f"{key}: {found}")
            if re.search(r"[\ud800-\udfff]", entry[key]):  # JSON can spell it, and UTF-8 cannot
                raise _malformed(task, line, f"{key}: half a surrogate pair")
        yield line, entry[task.prompt_key], entry[task.answer_key]


def _malformed(task: FileConfig, line: int, problem: str) -> ValueError:
    return ValueError(
        f"{task.path}, line {line}: {problem}; each line is an object of JSON with texts under prompt_key = "
        f"{task.prompt_key} and answer_key = {task.answer_key}"
    )
