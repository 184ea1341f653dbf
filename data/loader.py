"""Load the batches of training steps and of evaluations as this rank's tensors.

`BatchPlan` says which global samples a step trains on, `TrainOrder` locates them, `gather` reads them, and background
threads stay a step or two ahead. The only state is the step: a run can resume anywhere at no cost, on any world size.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from plumbline.data.config import DataConfig
from plumbline.data.corpus import Split
from plumbline.data.indexed import Int64s
from plumbline.data.memory import Memory
from plumbline.data.mixture import CYCLE, ENDLESS, OrderedSource
from plumbline.data.opening import check_same_tokenizer, open_corpora, training_stream
from plumbline.data.order import Location, TrainOrder
from plumbline.data.packed import PackedSplit
from plumbline.data.paths import is_url
from plumbline.data.prefetch import DEPTH, prefetch
from plumbline.data.remote.ahead import MEMORY, Ahead
from plumbline.data.remote.cache import Cache
from plumbline.data.remote.piece import Piece
from plumbline.data.skipped import NOTHING, SkippedData
from plumbline.data.streams import BYTES_PER_TOKEN, SampleSource, WindowStream, training_split
from plumbline.data.windows import Batch, check_ids, gather, pinned, split

Steps = list[list[Batch]]
"""For each of some steps, its micro-batches."""

CALIBRATION_ROWS = 8
LOCATED = 16384  # samples located together: many cost little more than one
TOGETHER = 2**19  # most tokens read together, 13 MB of batches, unless a step has more
MAX_EPOCHS = 40
"""Default limit of epochs of a corpus without `max_epochs`: beyond it, repeated text is worth nothing (arXiv
2305.16264, where 4 epochs are as good as new text)."""


class TrainBatches:
    """Read the training batches of one rank.

    Attributes:
        corpora: The open corpora and tasks by name, in the order of the configuration.
        plan: Which global samples each step takes.
        order: Where each global sample lies.
        micro_batch: Sequences of each micro-batch.
        accumulation_steps: Micro-batches per step, after the batch-size warm-up.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        vocab_size: int | None = None,
        gpu: int | None = None,
    ) -> None:
        """Open the corpora and check that they can make a batch.

        Args:
            config: What to read, and in which batch shape.
            seed: Seed of the order of samples.
            rank: Rank of this process.
            world_size: Processes that share the work.
            vocab_size: Refuse token ids at or above this when they are read; None takes any.
            gpu: Index of this process's GPU, to which batches will be copied asynchronously: the threads that read them
                pin their memory. None: no GPU.

        Raises:
            ValueError: a corpus is missing, damaged, too short, or made with another tokenizer than the rest, or the
                batch does not divide over the ranks.
        """
        self.config = config
        self.plan = config.batch_plan
        self.micro_batch = config.micro_batch(world_size)
        self.accumulation_steps = config.accumulation_steps(world_size)
        self.corpora = open_corpora(config.train, config.cache)
        check_same_tokenizer(self.corpora.items())
        self._streams = [training_stream(corpus, config) for corpus in self.corpora.values()]
        self.order = TrainOrder(list(self._ordered_sources()), seed)
        self._memory = Memory(DEPTH + config.reader_threads + 1)
        self._rank = rank
        self._world_size = world_size
        self._vocab_size = vocab_size
        self._gpu = gpu

    @property
    def is_remote(self) -> bool:
        """Return whether a corpus is at a URL."""
        return any(is_url(path) for source in self.config.train for path in source.paths)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of step `step` (from 0), each of [micro_batch, sequence_length].

        Micro-batch i of rank r holds global samples samples_before(s) + (i*W + r)*m to + m, so which samples a step
        contains does not depend on the world size W, nor on the micro-batch size m.
        """
        samples = self._samples(step)
        located = self.order.locate(samples.reshape(-1))
        (batches,) = self._gather([samples], located.source, located.window)
        return batches

    def iterate(
        self, start_step: int, stop_step: int, skipped: SkippedData = NOTHING
    ) -> Generator[list[Batch], None, None]:
        """Yield the micro-batches of each step in [start_step, stop_step), read ahead in background threads.

        Reading to the end or closing (`with contextlib.closing(...)`) stops the threads.

        Args:
            start_step: the first step.
            stop_step: the step after the last one.
            skipped: data to leave out; a step then yields the `micro_batches` of its data step.
        """
        tasks = self._tasks(start_step, stop_step, skipped)
        if not self.is_remote:
            with contextlib.closing(prefetch(tasks, self.config.reader_threads)) as groups:
                for steps in groups:
                    yield from steps
            return
        cache = Cache(self.config.cache)
        ahead = Ahead(cache, lambda step: self.remote_pieces(skipped.data_step(step)), stop_step)
        with contextlib.closing(ahead):
            lock = threading.Lock()  # guards `ahead`, which the threads advance in turn
            fetched = (partial(_fetched, ahead, lock, step, task) for step, task in enumerate(tasks, start_step))
            with contextlib.closing(prefetch(fetched, self.config.reader_threads)) as groups:
                for (batches,) in groups:
                    yield batches

    @property
    def _together(self) -> int:
        """Return the most steps that are read together: one with remote corpora, as each step waits for its pieces."""
        tokens = self.micro_batch * self.accumulation_steps * self.config.sequence_length
        return 1 if self.is_remote else max(1, TOGETHER // tokens)

    def _tasks(self, start_step: int, stop_step: int, skipped: SkippedData) -> Iterator[Callable[[], Steps]]:
        """Yield what makes the batches of one step, then of two, of four and so on, up to `_together`."""
        together = 1
        for samples, located in self._located(start_step, stop_step, skipped):
            begin = 0
            while samples:
                group, samples = samples[:together], samples[together:]
                end = begin + sum(each.size for each in group)
                yield partial(self._gather, group, located.source[begin:end], located.window[begin:end])
                begin = end
                together = min(2 * together, self._together)

    def _located(
        self, start_step: int, stop_step: int, skipped: SkippedData
    ) -> Iterator[tuple[list[Int64s], Location]]:
        """Yield the samples of one step and where they lie, then of two steps, of four and so on, up to LOCATED."""
        most = max(1, LOCATED * self._world_size // self.plan.batch_size)
        first, count = start_step, 1
        while first < stop_step:
            steps = range(first, min(first + count, stop_step))
            samples = [self._samples(skipped.data_step(step)) for step in steps]
            yield samples, self.order.locate(np.concatenate([each.reshape(-1) for each in samples]))
            first, count = steps.stop, min(2 * count, most)

    def _samples(self, step: int) -> Int64s:
        """Return the numbers of this rank's samples of a step, [accumulation_steps, micro_batch]."""
        size = self.micro_batch
        accumulation_steps = self.plan.batch_size_at(step) // (size * self._world_size)
        passes = np.arange(accumulation_steps) * self._world_size + self._rank
        first = self.plan.samples_before(step) + passes * size
        return first[:, None] + np.arange(size)

    def _gather(self, samples: Sequence[Int64s], sources: Int64s, windows: Int64s) -> Steps:
        """Return the micro-batches of some steps, each given by its `samples` [accumulation_steps, micro_batch]."""
        numbers = np.concatenate([each.reshape(-1) for each in samples])
        rows = gather(self._streams, sources, windows, numbers, self.config.sequence_length, self._memory)
        if self._vocab_size is not None:
            check_ids(rows, self._vocab_size, lambda row: list(self.corpora.values())[sources[row]])
        batches = iter(split(rows if self._gpu is None else pinned(rows, self._gpu), self.micro_batch))
        return [list(islice(batches, len(each))) for each in samples]

    def remote_pieces(self, step: int) -> list[Piece]:
        """Return the pieces that this rank must fetch to read step `step`, in order; local sources need none."""
        located = self.order.locate(self._samples(step))
        return [
            piece
            for source, window in zip(located.source.flat, located.window.flat, strict=True)
            if isinstance(stream := self._streams[source], Split | PackedSplit)
            for piece in stream.remote_pieces(int(window), self.config.sequence_length)
        ]

    def describe_memory(self) -> str:
        """Return one line on the host memory that reading takes, and the disk space for corpora at URLs."""
        tokens = self.micro_batch * self.accumulation_steps * self.config.sequence_length
        held = (DEPTH + self.config.reader_threads + 1) * self._together  # ready, being read, and being trained on
        line = f"at most {held * tokens * BYTES_PER_TOKEN / 1e6:,.1f} MB of host memory per rank for batches"
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

    def check_epochs(self, steps: int) -> None:
        """Refuse to read a corpus more often than makes sense, unless the configuration sets a limit.

        Raises:
            ValueError: names the corpus and its epochs, or the tokens after which no source is left.
        """
        for (name, epochs), source in zip(self.epochs(steps).items(), self.config.train, strict=True):
            if source.task is None and source.max_epochs is None and epochs > MAX_EPOCHS:
                raise ValueError(
                    f"data.train: {steps:,} steps read {name} {epochs:.1f} times; beyond {MAX_EPOCHS} repetitions text "
                    f"teaches nothing new (arXiv 2305.16264): train for less (about {steps * MAX_EPOCHS / epochs:,.0f} "
                    "steps), lower its weight, or set max_epochs of this source, after which the others take over"
                )
        end = self.order.mixture.end
        if self.plan.samples_before(steps) > end:
            raise ValueError(
                f"data.train: no source is left after {end * self.config.sequence_length:,} tokens, before the end of "
                f"{steps:,} steps: raise max_epochs of one, or the last weight, or train for less"
            )

    def notes(self, steps: int) -> Iterator[str]:
        """Yield lines on the data of `steps` steps: mixture, packing, memory."""
        length, total = self.config.sequence_length, self.plan.samples_before(steps)
        segments = [segment for segment in self.order.mixture.segments if segment.first_sample < total]
        shown = segments if len(segments) <= 4 else [*segments[:2], *segments[-2:]]
        for segment in shown if len(segments) > 1 else []:
            shares = ", ".join(
                f"{source.name} {count / CYCLE:.2%}"
                for source, count in zip(self.order.sources, segment.per_cycle, strict=True)
                if count
            )
            yield f"mixture  from {segment.first_sample * length:,} tokens: {shares}"
        if len(shown) < len(segments):
            yield f"mixture  changes {len(segments) - 1:,} times in all"
        for name, stream in zip(self.corpora, self._streams, strict=True):
            if isinstance(stream, PackedSplit):
                yield f"packing  {name}: {stream.facts}"
        yield f"reading  {self.describe_memory()}"

    def _ordered_sources(self) -> Iterator[OrderedSource]:
        length = self.config.sequence_length
        named = zip(self.corpora.items(), self._streams, self.config.train, strict=True)
        for (name, corpus), stream, source in named:
            windows = stream.training_windows(length)
            limit = None if source.max_epochs is None else min(ENDLESS, max(1, int(source.max_epochs * windows)))
            yield OrderedSource(name, corpus.fingerprint, windows, source.weight, source.changes(length), limit)


class ValidationBatches:
    """Read a fixed set of windows of one split, the same at every evaluation and for every world size.

    Rank r of W evaluates micro-batches r, r + W, r + 2W, ... Every rank yields the same number of batches, all of the
    same shape: when windows run out, rows are padding with labels -100 and sample_index -1.

    Attributes:
        num_windows: Number of windows that all ranks evaluate together.
    """

    def __init__(
        self,
        split: WindowStream,
        sequence_length: int,
        micro_batch_size: int,
        max_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        """Choose the windows.

        Args:
            split: What to read, for example `corpus.held_out`.
            sequence_length: Tokens per sample.
            micro_batch_size: Rows per batch.
            max_batches: Most batches over all ranks, whose windows are spread evenly over the split; None reads the
                whole split, to its last token.
            rank: Rank of this process.
            world_size: Processes that share the work.
            vocab_size: Refuse token ids at or above this; None takes any.

        Raises:
            ValueError: the split has no token to predict.
        """
        available = split.evaluation_windows(sequence_length)
        wanted = available if max_batches is None else max_batches * micro_batch_size
        self.num_windows = min(available, wanted)
        self._windows = np.arange(self.num_windows) * available // self.num_windows
        self._split = split
        self._length = sequence_length
        self._rows = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """Return the number of batches that each rank yields."""
        return -(-self.num_windows // (self._rows * self._world_size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, the same at every call."""
        for step in range(len(self)):
            first = (step * self._world_size + self._rank) * self._rows
            numbers = np.full(self._rows, -1)
            mine = self._windows[first : first + self._rows]
            numbers[: len(mine)] = mine
            batch = gather([self._split], np.minimum(numbers, 0), numbers, numbers, self._length)
            yield batch if self._vocab_size is None else check_ids(batch, self._vocab_size, lambda _: self._split)


def _fetched(ahead: Ahead, lock: threading.Lock, step: int, task: Callable[[], Steps]) -> Steps:
    """Make the batches of a step from corpora at URLs, and start to fetch the pieces of the next steps."""
    with lock:
        ahead.reach(step)
    return task()


def calibration_batches(source: SampleSource, length: int, sequences: int) -> Iterator[Batch]:
    """Yield windows spread evenly over the training split, up to `CALIBRATION_ROWS` in a batch."""
    split = training_split(source)
    available = split.training_windows(length)
    numbers = np.arange(min(sequences, available)) * available // min(sequences, available)
    for first in range(0, len(numbers), CALIBRATION_ROWS):
        chosen = numbers[first : first + CALIBRATION_ROWS]
        yield gather([split], np.zeros_like(chosen), chosen, chosen, length)
