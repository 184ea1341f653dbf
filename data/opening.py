"""Open the sources of a run by name: corpora, packed or not, and tasks, all with the same tokenizer."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.corpus import Corpus, Split, open_corpus
from plumbline.data.packed import open_packed
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.streams import SampleSource, WindowStream, training_split
from plumbline.data.tasks.source import TaskSource

LOG = logging.getLogger(__name__)


def training_stream(corpus: SampleSource, config: DataConfig) -> WindowStream:
    """Return the training windows of a source, packed if the configuration says so."""
    split = training_split(corpus)
    if config.packing == "best_fit" and isinstance(split, Split):
        return open_packed(split, corpus.fingerprint, config.sequence_length)
    return split


def open_corpora(sources: Sequence[SourceConfig], cache: CacheConfig | None = None) -> dict[str, SampleSource]:
    """Open corpora and tasks, keyed by the configured name, the last part of the path or the task's name.

    The sizes of their files are not compared, since one rank can do that for all (`Corpus.check_sizes`).

    Args:
        sources: what to open.
        cache: where parts of corpora at URLs are kept.

    Raises:
        ValueError: one cannot be opened, or two share a name.
    """
    corpora: dict[str, SampleSource] = {}
    for source in sources:
        corpus = open_source(source, cache, check_sizes=False)
        name = source.name or corpus.name
        if name in corpora:
            raise ValueError(
                f"data: two corpora are named {name!r} ({corpora[name]} and {corpus}); give one of them another `name`"
            )
        corpora[name] = corpus
    return corpora


def open_source(source: SourceConfig, cache: CacheConfig | None = None, check_sizes: bool = True) -> SampleSource:
    """Open one corpus or task; a corpus at a URL is read through a cache.

    Raises:
        ValueError: the corpus cannot be opened, or the task has too few examples to hold some out.
    """
    if source.task is not None:
        return TaskSource(source.task)
    assert source.path is not None, "SourceConfig checks that one of the two is given"
    return open_corpus(source.path, cache, check_sizes)


def evaluated_sources(config: DataConfig, trained: Mapping[str, SampleSource]) -> dict[str, SampleSource]:
    """Return the sources on whose `held_out` to evaluate, by name.

    They are those of `data.validation`, or the training corpora that hold something out.

    Args:
        config: what to read.
        trained: the sources of `data.train`, opened and named.

    Raises:
        ValueError: one cannot be opened, or was made with a different tokenizer from the training data.
    """
    if config.validation:
        held_out = open_corpora(config.validation, config.cache)
        check_same_tokenizer([*trained.items(), *held_out.items()])
        _warn_of_what_is_trained_on(trained, held_out)
    else:
        held_out = {name: corpus for name, corpus in trained.items() if "validation" in corpus.splits}
    _warn_of_shared_files(trained, held_out)
    return held_out


def _warn_of_what_is_trained_on(trained: Mapping[str, SampleSource], evaluated: Mapping[str, SampleSource]) -> None:
    """Warn of sources that are evaluated on their training data: bare pairs and files of prompts hold nothing out."""
    fingerprints = [corpus.fingerprint for corpus in trained.values()]
    for name, corpus in evaluated.items():
        if "validation" not in corpus.splits and corpus.fingerprint in fingerprints:
            LOG.warning(
                f"data.validation: {name} ({corpus}) is trained on: its loss says nothing of text that is held out"
            )


def _warn_of_shared_files(trained: Mapping[str, SampleSource], evaluated: Mapping[str, SampleSource]) -> None:
    """Warn of two corpora of the same files of which one may hold out what the other has for training."""
    for (name, corpus), other in product(evaluated.items(), trained.values()):
        one, two = (each.manifest if isinstance(each, Corpus) else None for each in (corpus, other))
        if one is None or two is None or one.held_out_by == two.held_out_by or "train" not in two.splits:
            continue
        if shared := set(one.source_files).intersection(two.source_files):
            LOG.warning(
                f"data: {name} ({corpus}) and {other} were made of {len(shared):,} of the same files, and hold out "
                f"text by different rules: some that {name} is scored on may be trained on; leave them out of one"
            )


def check_same_tokenizer(corpora: Iterable[tuple[str, SampleSource]]) -> None:
    """Check that all named sources that state a tokenizer state the same one.

    Raises:
        ValueError: two differ in tokenizer or end-of-text token; the message says what to prepare again.
    """
    known = [(name, corpus) for name, corpus in corpora if corpus.tokenizer_sha256 is not None]
    for name, corpus in known:
        if corpus.tokenizer_sha256 != known[0][1].tokenizer_sha256:
            raise ValueError(
                f"data: {known[0][1]} and {corpus} were made with different tokenizers; "
                f"{_remedy(*known[0], name, corpus)}"
            )
    made = [(name, corpus) for name, corpus in known if isinstance(corpus, Corpus)]
    for name, corpus in made:
        first_name, first = made[0]
        if corpus.eos_token_id != first.eos_token_id:
            raise ValueError(
                f"data: documents of {first} end with token {first.eos_token_id}, those of {corpus} with "
                f"{corpus.eos_token_id}, the eos_token of their tokenizers; {_remedy(first_name, first, name, corpus)}"
            )


def _remedy(first_name: str, first: SampleSource, name: str, corpus: SampleSource) -> str:
    """Return how to give two sources the same tokenizer: a task takes any, a corpus has to be prepared again."""
    if not isinstance(corpus, TaskSource) and not isinstance(first, TaskSource):
        again = f"prepare {name} again with --tokenizer {first.tokenizer_path} --overwrite"
        return f"{again} (or {first_name} with the other one)"
    task, other = (name, first) if isinstance(corpus, TaskSource) else (first_name, corpus)
    if isinstance(other, TaskSource):
        return f"give {first_name} and {name} the same task.tokenizer"
    return f"give {task} task.tokenizer = {other.tokenizer_path}"
