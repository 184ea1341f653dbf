r"""Read a task from a JSON Lines file with a prompt and an answer per line, tokenized by any tokenizer.

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
from pydantic import PositiveInt, model_validator

from plumbline.data.damage import in_words
from plumbline.data.indexed import Int64s, Integers
from plumbline.data.order import derive_key
from plumbline.data.paths import HomePath
from plumbline.data.tasks.draws import Draws
from plumbline.data.tasks.task import Example, SplitName, TaskConfig, answering
from plumbline.data.tokenizer_making import tokenizer_folder, trained_size
from plumbline.data.tokenizers import Encoder, tokenizer_sha256

LOG = logging.getLogger(__name__)

PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""How files begin that gzip and zstd packed."""
OTHERS = 64
"""Most other prompts that are tried as another question."""


class FileConfig(TaskConfig):
    """Configure the examples of one file, which are all for training or all for evaluation.

    Only the answer and the end-of-text token after it have labels.
    """

    name: Literal["file"] = "file"
    """Which task."""
    path: HomePath
    """The file: one JSON object per line; blank lines are skipped."""
    tokenizer: HomePath = "byte"
    """byte, a folder with a tokenizer (such as a corpus's corpora/NAME/tokenizer), or hf:NAME."""
    prompt_key: str = "prompt"
    """Key of the text that the model reads."""
    answer_key: str = "answer"
    """Key of the text that the model has to produce."""
    template: str = "{prompt}\n{answer}"
    """How an example is written: the model reads everything before {answer} and has to produce the rest."""
    max_tokens: PositiveInt | None = None
    """Longer examples are left out, and the log says how many; null: all are kept, and it is an error if one does not
    fit into a sequence."""

    holds_out: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> "FileConfig":
        template = self.template
        if trained_size(self.tokenizer) is not None:
            raise ValueError(f"tokenizer = {self.tokenizer}: is not trained on a task; give byte, a folder or hf:NAME")
        before, _, after = template.partition("{answer}")
        if before.count("{prompt}") != 1 or "{prompt}" in after or template.count("{answer}") != 1:
            raise ValueError(f"template = {template!r}: give {{prompt}} once and, behind it, {{answer}} once")
        if others := set(re.findall(r"\{(\w+)\}", template)) - {"prompt", "answer"}:
            raise ValueError(
                f"template = {template!r}: {{{min(others)}}} is not filled in; write prompts of several fields into "
                "the file, under prompt_key"
            )
        return self

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
        """Return the tokenizer's number of ids."""
        return Encoder(self.tokenizer_folder, self.tokenizer).vocab_size

    @property
    def longest(self) -> int:
        """Return the number of input tokens of the longest example; its last answer is not an input."""
        return int(read(self).lengths.max())

    def too_short(self, length: int) -> str:
        """Return why samples of `length` tokens are too short: it names the line with the longest example."""
        examples = read(self)
        line = examples.lines[int(examples.lengths.argmax())]
        return (
            f"data.sequence_length {length} is too short for {self.path}, line {line}, which has {self.longest} "
            f"tokens; set it to {self.longest} or more, or leave longer examples out with task.max_tokens = {length}"
        )

    @property
    def fingerprint(self) -> str:
        """Return sixteen hex digits that hash the keys, the file's content and the tokenizer."""
        settings = self.model_dump(exclude={"path", "tokenizer"}, exclude_none=True)
        return f"{derive_key(settings, read(self).digest, tokenizer_sha256(self.tokenizer_folder)):016x}"

    def num_examples(self, _split: SplitName) -> int:
        """Return the number of examples that are kept."""
        return len(read(self).lines)

    def example(self, _split: SplitName, number: int) -> Example:
        """Return example `number` of the file, the same for either split."""
        return _example(*read(self).parts(number))

    def ask_otherwise(self, tokens: Int64s, _draws: Draws) -> Int64s:
        """Return the tokens unchanged, since they do not tell what else to ask; see `with_another_question`."""
        return tokens

    def with_another_question(self, split: SplitName, number: int) -> Example:
        """Return example `number` with its own answer after the prompt of another example, if one fits."""
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
    """All sequences concatenated, each a prompt and an answer."""
    starts: Int64s
    """[n + 1]: where each begins in `tokens`."""
    prompts: Int64s
    """[n]: tokens of each prompt."""
    lines: Int64s
    """[n]: the line number of each, from 1."""
    digest: str
    """Hash of the file's bytes."""

    @property
    def lengths(self) -> Int64s:
        """Return the number of input tokens [n] of each: all but the last one, which is only predicted."""
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
    """Read the file of a task, once per process, so that the data of a run cannot change.

    Raises:
        ValueError: the file is missing, or a line is malformed; the message names the line and the field.
    """
    try:
        content = Path(task.path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{task.path}: cannot be read ({error.strerror}); give task.path a file of JSON Lines"
        ) from error
    if content.startswith(PACKED):
        raise ValueError(f"{task.path}: is packed (gzip or zstd); unpack it and give task.path the JSON Lines")
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
        except (ValueError, RecursionError) as error:
            raise _malformed(task, line, f"not JSON ({in_words(error)})") from error
        if not isinstance(entry, dict):
            raise _malformed(task, line, f"a {type(entry).__name__}, not an object")
        for key in (task.prompt_key, task.answer_key):
            if not isinstance(entry.get(key), str):
                found = (
                    f"{json.dumps(entry[key])[:40]} is no text" if key in entry else f"missing; there are {[*entry]}"
                )
                raise _malformed(task, line, f"{key}: {found}")
            if re.search(r"[\ud800-\udfff]", entry[key]):  # a lone surrogate, which JSON can spell but UTF-8 cannot
                raise _malformed(task, line, f"{key}: half a surrogate pair")
        if not entry[task.answer_key]:
            raise _malformed(task, line, f"{task.answer_key}: empty")
        yield line, entry[task.prompt_key], entry[task.answer_key]


def _malformed(task: FileConfig, line: int, problem: str) -> ValueError:
    return ValueError(
        f"{task.path}, line {line}: {problem}; each line is an object of JSON with texts under prompt_key = "
        f"{task.prompt_key} and answer_key = {task.answer_key}"
    )
