"""Open the data on which a model is scored, and check that it fits: corpora, plain text, tasks, window lengths."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from plumbline.data.config import SourceConfig
from plumbline.data.corpus import Corpus, open_corpus
from plumbline.data.disk import naming_full_disk
from plumbline.data.missing import NoCorpusError, how_to_prepare
from plumbline.data.opening import open_source
from plumbline.data.prepare import Request, prepare
from plumbline.data.sources import Sources
from plumbline.data.streams import SampleSource, WindowStream
from plumbline.data.tasks.source import TaskStream
from plumbline.data.tokenizer_making import tokenizer_folder
from plumbline.data.tokenizers import tokenizer_sha256
from plumbline.launcher.runtime.config.parse import option_problems, refuse_non_finite
from plumbline.launcher.runtime.config.yaml_files import parse_yaml
from plumbline.launcher.runtime.models.facts import model_facts
from plumbline.launcher.runtime.models.open import LoadedModel

LONGEST = 1024  # tokens of a window if neither the request nor a training run sets them


def window_length(model: LoadedModel, asked: int | None) -> int:
    """Return the tokens of one window: as requested, else as in training.

    Raises:
        ValueError: the model has fewer positions.
    """
    longest = model.context_length
    length = asked or (model.config.data.sequence_length if model.config else min(longest or LONGEST, LONGEST))
    if longest is not None and length > longest:
        raise ValueError(f"--sequence-length {length} exceeds the model's {longest} positions")
    return length


def open_data(path: str, model: Path, trains: bool = False) -> SampleSource:
    """Open the corpus on which a model is to be scored.

    Args:
        path: the corpus.
        model: run, checkpoint or Hugging Face folder.
        trains: whether its training split is needed as well.

    Raises:
        ValueError: it cannot be opened; if it is missing, the message has the command that makes it for this model.
    """
    try:
        return open_source(SourceConfig(path=path))
    except NoCorpusError as error:
        tokenizer = model_facts(model).tokenizer_path or "TOKENIZER"
        command = how_to_prepare(error.path, str(tokenizer), "" if trains else " --validation-fraction 1")
        plain = "" if trains or not error.path.exists() else f". Score the text as it is with: --text {path}"
        raise ValueError(f"{error.problem}{plain}. Make one for this model with: {command}") from error


@contextmanager
def prepared_text(text: str, tokenizer: Path) -> Iterator[Corpus]:
    """Tokenize a file or folder of text ("-" for standard input) as a temporary corpus that is all held out.

    Raises:
        ValueError: there is no text in it, or the tokenizer cannot end documents.
    """
    with TemporaryDirectory(prefix="text-") as folder:
        source = Path(text).resolve()
        with naming_full_disk(folder, "set TMPDIR to another folder"):
            if text == "-":
                source = Path(folder) / "standard-input"
                source.write_bytes(sys.stdin.buffer.read())
            request = Request(Sources((str(source),)), str(tokenizer), Path(folder) / "corpus", validation_fraction=1.0)
            try:
                prepare(request)
            except ValueError as error:
                more = "; prepare.py takes these options: with --validation-fraction 1 it makes what --data scores"
                raise ValueError(f"--text {text}: {error}{more if '--text-key' in str(error) else ''}") from error
        yield replace(open_corpus(request.output), path="standard input" if text == "-" else text)


def check_tokenizer(model: LoadedModel, corpus: SampleSource) -> None:
    """Refuse to score tokens that have a different meaning in the model.

    Raises:
        ValueError: the corpus was made with another tokenizer, or has ids outside the model's vocabulary.
    """
    check_vocabulary(model, corpus)
    if model.tokenizer_path is None or corpus.tokenizer_sha256 is None:
        return
    if not (model.tokenizer_path / "tokenizer.json").is_file():
        return
    if not is_same_tokenizer(model.tokenizer_path, corpus.tokenizer_sha256):
        raise ValueError(
            f"{corpus}: made with another tokenizer than {model.source}; prepare the text again with "
            f"--tokenizer {model.tokenizer_path}"
        )


def is_same_tokenizer(folder: Path, sha256: str) -> bool:
    """Return whether the tokenizer in a folder made a corpus, directly or as re-saved by `prepare.py`."""
    return tokenizer_sha256(folder) == sha256 or tokenizer_sha256(tokenizer_folder(str(folder))) == sha256


def check_vocabulary(model: LoadedModel, corpus: SampleSource) -> None:
    """Refuse ids outside the model's vocabulary.

    Raises:
        ValueError: names both vocabularies.
    """
    vocabulary = model.vocab_size
    if corpus.vocab_size is not None and corpus.vocab_size > vocabulary:
        remedy = f"prepare the text with --tokenizer {model.tokenizer_path or 'TOKENIZER, that of the model'}"
        if isinstance(corpus.held_out, TaskStream):
            remedy = "give --task what fixes the meaning of ids in the run's own task (form, answer, names, ...)"
            own = [] if model.config is None else [*model.config.data.held_out_tasks]
            remedy += f", or name one of the run: {', '.join(own)}" if own else ""
        raise ValueError(
            f"{corpus}: vocabulary of {corpus.vocab_size}, but {model.source} knows {vocabulary} ids; {remedy}"
        )


def read_task(text: str) -> SourceConfig | None:
    """Return the task that `--task` describes, or None if it is only a name.

    Raises:
        ConfigError: it is not YAML, or there is no such task.
    """
    if ":" not in text:
        return None
    task = parse_yaml(text, f"--task {text}")
    refuse_non_finite(task, f"--task {text}")
    with option_problems("--task", SourceConfig):
        return SourceConfig.model_validate({"task": task})


def own_task(model: LoadedModel, name: str) -> SourceConfig:
    """Return the task that a run was evaluated on under this name.

    Raises:
        ValueError: there is none.
    """
    if model.config is None:
        raise ValueError(f"--task {name}: {model.source} is no run, which would know it; write it out as YAML")
    tasks = model.config.data.held_out_tasks
    if name not in tasks:
        known = f"only {', '.join(tasks)}" if tasks else "none"
        raise ValueError(f"--task {name}: of tasks, the run of {model.source} has {known}; write others out as YAML")
    return tasks[name]


def held_out(corpus: SampleSource, shuffle_questions: bool) -> WindowStream:
    """Return the held-out part of a corpus or task, with its questions shuffled if requested.

    Raises:
        ValueError: there are no questions to shuffle.
    """
    if not shuffle_questions:
        return corpus.held_out
    if not isinstance(corpus.held_out, TaskStream):
        raise ValueError(f"--shuffle-questions: {corpus} is text and asks nothing; give --task or leave it out")
    return replace(corpus.held_out, another_question=True)
