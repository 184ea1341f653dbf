"""Load the batches of training steps and of evaluations as this rank's tensors.

`BatchPlan` says which global samples a step trains on, `TrainOrder` finds them, `gather` reads them, and one background
thread stays a step or two ahead. The only state is the step: a run resumes anywhere at no cost, on any world size.
"""

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from plumbline.data.config import DataConfig, SourceConfig
from plumbline.data.corpus import Split, open_corpus
from plumbline.data.indexed import Int64s
from plumbline.data.order import Location, OrderedSource, TrainOrder
from plumbline.data.remote.ahead import MEMORY, Ahead
from plumbline.data.remote.cache import Cache, CacheConfig
from plumbline.data.remote.fetch import is_url
from plumbline.data.remote.piece import Piece
from plumbline.data.streams import SampleSource, WindowStream
from plumbline.data.tasks.source import TaskSource
from plumbline.data.windows import Batch, gather

Item = TypeVar("Item")
CALIBRATION_ROWS = 8
DEPTH = 2
"""Steps whose batches are read ahead."""
TOKEN_BYTES = 24
"""Bytes of a token in a batch: two numbers of 8 bytes, two of 4."""


class TrainBatches:
    """Read the training batches of one rank.

    Attributes:
        corpora: The open corpora and tasks by name, in the order of the configuration.
        plan: Which global samples each step takes.
        order: Where each global sample lies.
        micro_batch: Sequences of each micro-batch.
        accumulation_steps: Micro-batches per step, after the batch-size warm-up.
    """

    def __init__(self, config: DataConfig, seed: int, rank: int = 0, world_size: int = 1) -> None:
        """Open the corpora and check that they can make a batch.

        Raises:
            ValueError: a corpus is missing, damaged, too short, or made with another tokenizer than the rest, or the
                batch does not divide over the ranks.
        """
        self.config = config
        self.plan = config.batch_plan
        self.micro_batch = config.micro_batch(world_size)
        self.accumulation_steps = config.accumulation_steps(world_size)
        self.corpora = open_corpora(config.train, config.cache)
        _check_same_tokenizer(self.corpora)
        self.order = TrainOrder(
            [
                OrderedSource(
                    name,
                    corpus.fingerprint,
                    corpus.splits["train"].training_windows(config.sequence_length),
                    source.weight,
                )
                for (name, corpus), source in zip(self.corpora.items(), config.train, strict=True)
            ],
            seed,
        )
        self._splits = [corpus.splits["train"] for corpus in self.corpora.values()]
        self._rank = rank
        self._world_size = world_size

    @property
    def is_remote(self) -> bool:
        """Return whether a corpus is at a URL."""
        return any(is_url(path) for source in self.config.train for path in source.paths)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of step `step` (from 0), each of [micro_batch, sequence_length].

        Micro-batch i of rank r holds global samples samples_before(s) + (i*W + r)*m to + m, so which samples a step
        contains does not depend on the world size W, nor on the micro-batch size m.
        """
        samples, located = self._locate(step)
        return [
            gather(
                [(self._splits[source], int(window)) for source, window in zip(sources, windows, strict=True)],
                numbers.tolist(),
                self.config.sequence_length,
            )
            for sources, windows, numbers in zip(located.source, located.window, samples, strict=True)
        ]

    def _locate(self, step: int) -> tuple[Int64s, Location]:
        """Return the samples [accumulation_steps, micro_batch] of this rank in a step, and where they lie."""
        size = self.micro_batch
        accumulation_steps = self.plan.batch_size_at(step) // (size * self._world_size)
        passes = np.arange(accumulation_steps) * self._world_size + self._rank
        first = self.plan.samples_before(step) + passes * size
        samples = first[:, None] + np.arange(size)
        return samples, self.order.locate(samples)

    def pieces(self, step: int) -> list[Piece]:
        """Return what this rank has to fetch to read step `step`, in order; nothing of local corpora and tasks."""
        _, located = self._locate(step)
        return [
            piece
            for source, window in zip(located.source.flat, located.window.flat, strict=True)
            if isinstance(split := self._splits[source], Split)
            for piece in split.pieces(int(window), self.config.sequence_length)
        ]

    def iterate(self, start_step: int, stop_step: int) -> Generator[list[Batch], None, None]:
        """Yield `micro_batches` of each step in [start_step, stop_step), read ahead in a background thread.

        Reading to the end or closing (`with contextlib.closing(...)`) stops the thread.
        """
        if not self.is_remote:
            yield from prefetch(self.micro_batches(step) for step in range(start_step, stop_step))
            return
        with contextlib.closing(Ahead(Cache(self.config.cache), self.pieces, stop_step)) as ahead:
            yield from prefetch(self._fetched(step, ahead) for step in range(start_step, stop_step))

    def _fetched(self, step: int, ahead: Ahead) -> list[Batch]:
        ahead.reach(step)
        return self.micro_batches(step)

    def describe_memory(self) -> str:
        """Return in one line what reading takes of host memory, and of the disk for corpora at a URL."""
        tokens = self.micro_batch * self.accumulation_steps * self.config.sequence_length
        batches = (DEPTH + 2) * tokens * TOKEN_BYTES  # and one that is read, and one that is trained on
        line = f"at most {batches / 1e6:,.1f} MB of host memory per rank for batches"
        if self.is_remote:
            cache = self.config.cache
            line += (
                f", {MEMORY / 1e6:,.1f} MB for downloads into {cache.folder} (at most {cache.max_bytes / 1e9:,.3g} GB)"
            )
        return line

    def epochs(self, steps: int) -> dict[str, float]:
        """Return how many times `steps` steps read each training corpus, by name."""
        samples = self.order.samples_per_source(self.plan.samples_before(steps))
        return {source.name: samples[source.name] / source.num_windows for source in self.order.sources}


class ValidationBatches:
    """Read a fixed set of windows of one split, the same at every evaluation and for every world size.

    Rank r of W evaluates micro-batches r, r + W, r + 2W, ... Every rank yields the same number of batches, all of the
    same shape: where windows run out, rows are padding with every label -100 and sample_index -1.

    Attributes:
        num_windows: Windows evaluated over all ranks.
        covers_split: Whether they are the whole split, so that every token but the first is a target.
    """

    def __init__(
        self,
        split: WindowStream,
        sequence_length: int,
        micro_batch_size: int,
        max_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Choose the windows.

        Args:
            split: What to read, for example `corpus.held_out`.
            sequence_length: Tokens per sample.
            micro_batch_size: Rows per batch.
            max_batches: Upper bound on batches over all ranks, their windows spread evenly over the split; None reads
                the whole split, to its last token.
            rank: This process.
            world_size: Processes that share the work.

        Raises:
            ValueError: the split has no token to predict.
        """
        available = split.evaluation_windows(sequence_length)
        wanted = available if max_batches is None else max_batches * micro_batch_size
        self.num_windows = min(available, wanted)
        self.covers_split = self.num_windows == available
        self._windows = np.arange(self.num_windows) * available // self.num_windows
        self._split = split
        self._length = sequence_length
        self._rows = micro_batch_size
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        """Return the number of batches that each rank yields."""
        return -(-self.num_windows // (self._rows * self._world_size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the same batches at every call."""
        for step in range(len(self)):
            first = (step * self._world_size + self._rank) * self._rows
            numbers = self._windows[first : first + self._rows].tolist()
            padding = self._rows - len(numbers)
            windows = [(self._split, number) for number in numbers]
            yield gather([*windows, *[None] * padding], numbers + [-1] * padding, self._length)


def open_corpora(sources: Sequence[SourceConfig], cache: CacheConfig | None = None) -> dict[str, SampleSource]:
    """Open corpora and tasks and name them, by the configured name, the last part of the path or the task's name.

    Raises:
        ValueError: one cannot be opened, or two share a name.
    """
    corpora: dict[str, SampleSource] = {}
    for source in sources:
        corpus = open_source(source, cache)
        name = source.name or corpus.name
        if name in corpora:
            raise ValueError(
                f"data: two corpora are named {name!r} ({corpora[name]} and {corpus}); give one of them another `name`"
            )
        corpora[name] = corpus
    return corpora


def open_source(source: SourceConfig, cache: CacheConfig | None = None) -> SampleSource:
    """Open one corpus or task; a corpus at a URL by way of a cache.

    Raises:
        ValueError: the corpus cannot be opened, or the task has too few examples to hold some out.
    """
    if source.task is not None:
        return TaskSource(source.task)
    assert source.path is not None, "SourceConfig checks that one of the two is given"
    return open_corpus(source.path, cache)


def validation_splits(config: DataConfig) -> dict[str, WindowStream]:
    """Return the splits to evaluate on, by name.

    They are those of `data.validation`, or the held-out split of each training corpus that has one.
    """
    if config.validation:
        return {name: corpus.held_out for name, corpus in open_corpora(config.validation, config.cache).items()}
    corpora = open_corpora(config.train, config.cache)
    return {name: corpus.splits["validation"] for name, corpus in corpora.items() if "validation" in corpus.splits}


def prefetch(items: Iterable[Item], depth: int = DEPTH) -> Generator[Item, None, None]:
    """Yield `items` in order while one background thread computes up to `depth` of them ahead.

    An exception in the thread is raised here, in its place in the order. Closing the generator stops the thread.
    """
    ready: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                ready.put(item)
                if closed.is_set():
                    return
        except BaseException as caught:
            error = caught
        ready.put(_End(error))

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        while thread.is_alive():  # it may be waiting for room: make some
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.01)
        thread.join()


@dataclass(frozen=True)
class _End:
    """Mark the end of the queue, and hold why it ended."""

    error: BaseException | None


def _check_same_tokenizer(corpora: dict[str, SampleSource]) -> None:
    known = {name: corpus for name, corpus in corpora.items() if corpus.tokenizer_sha256 is not None}
    for name, corpus in known.items():
        first_name, first = next(iter(known.items()))
        if corpus.tokenizer_sha256 != first.tokenizer_sha256:
            raise ValueError(
                f"data.train: {first} and {corpus} were made with different tokenizers; prepare {name} "
                f"again with --tokenizer {first.tokenizer_path} --overwrite (or {first_name} with the other one)"
            )


def calibration_batches(source: SampleSource, length: int, sequences: int) -> Iterator[torch.Tensor]:
    """Yield token ids [B, T] of windows spread evenly over the training split, up to `CALIBRATION_ROWS` in a batch."""
    split = source.splits["train"]
    available = split.training_windows(length)
    numbers = [i * available // min(sequences, available) for i in range(min(sequences, available))]
    for first in range(0, len(numbers), CALIBRATION_ROWS):
        chosen = numbers[first : first + CALIBRATION_ROWS]
        yield gather([(split, number) for number in chosen], chosen, length)["input_ids"]
