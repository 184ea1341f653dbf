"""Decide what a model can be scored on: samples that fit it, its own tasks, and windows of which length."""

from plumbline.data.config import SourceConfig
from plumbline.data.streams import SampleSource
from plumbline.data.tokenizers import tokenizer_sha256
from plumbline.launcher.runtime.models.open import LoadedModel

LONGEST = 1024  # tokens of a window, where neither the request nor a training run says how long


def window_length(model: LoadedModel, asked: int | None) -> int:
    """Return the tokens of one window: what was asked for, else as in training.

    Raises:
        ValueError: the model has fewer positions.
    """
    length = asked or (model.config.data.sequence_length if model.config else min(model.context_length, LONGEST))
    if length > model.context_length:
        raise ValueError(f"--sequence-length {length} exceeds the model's {model.context_length} positions")
    return length


def check_tokenizer(model: LoadedModel, corpus: SampleSource) -> None:
    """Refuse to score tokens that mean something else to the model.

    Raises:
        ValueError: the corpus was made with another tokenizer, or has ids that the model does not know.
    """
    vocabulary = model.vocab_size
    if corpus.vocab_size is not None and corpus.vocab_size > vocabulary:
        raise ValueError(
            f"{corpus}: vocabulary of {corpus.vocab_size}, but {model.source} knows {vocabulary} ids; "
            "prepare the text with the model's tokenizer"
        )
    if model.tokenizer_path is None or corpus.tokenizer_sha256 is None:
        return
    if not (model.tokenizer_path / "tokenizer.json").is_file():
        return
    if tokenizer_sha256(model.tokenizer_path) != corpus.tokenizer_sha256:
        raise ValueError(
            f"{corpus}: made with another tokenizer than {model.source}; prepare the text again with "
            f"--tokenizer {model.tokenizer_path}"
        )


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
