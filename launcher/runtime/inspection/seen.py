"""Open a run to inspect its data: the samples of a step, and the steps that read a text.

"Step N" is the state after N updates, as in metrics.jsonl. So the samples of step N are those that its last update
trained on, and the weights that predicted them are those of step N - 1.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from plumbline.data.finding import Found, find
from plumbline.data.loader import TrainBatches
from plumbline.data.opening import training_stream
from plumbline.data.packed import PackedSplit
from plumbline.data.skipped import SkippedData
from plumbline.data.streams import SampleSource
from plumbline.data.tokenizers import Decoder
from plumbline.data.windows import Batch
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.resume import skipped_data
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.plan import RunPlan, plan_run
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS, METRICS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.inspection.samples import Place, Sample, decoders, of_batch
from plumbline.launcher.runtime.run.metrics import metrics_from_end
from plumbline.launcher.runtime.system.log import LOG

LISTED = 1000
"""Most reads of a document to list."""


@dataclass(frozen=True)
class Read:
    """State when a window was or will be read."""

    step: int
    """The step whose update trains on the window, numbered as in metrics.jsonl."""
    sample: int
    epoch: int
    window: int
    holds_text: bool
    """Whether this window contains the text itself, not only another part of its document."""


@dataclass(frozen=True)
class Step:
    """Hold the samples of a step, or one rank's part of them."""

    step: int
    """As in metrics.jsonl."""
    rank: int | None
    """The rank, or None for all ranks."""
    batches: list[Batch]
    samples: list[Sample]
    loss: float | None
    """The training loss that was logged, or None if it was not."""


def places(batches: TrainBatches, batch: Batch) -> Iterator[Place]:
    """Yield the place of each row of a batch."""
    located = batches.order.locate(batch["sample_index"].numpy())
    for source, epoch, window in zip(located.source, located.epoch, located.window, strict=True):
        name = batches.order.sources[source].name
        yield Place(name, int(window), batches.corpora[name].splits["train"].has_answers, int(epoch))


class SeenRun:
    """Hold a run folder, opened to look at its data.

    Attributes:
        folder: the run.
        config: its configuration.
        plan: its plan.
        batches: its training batches on a single rank, with one sample per micro-batch.
        skipped: the data that the run leaves out.
        last_step: the last logged step, or 0 if there is none.
    """

    def __init__(self, folder: Path) -> None:
        """Open what the run trained on.

        Raises:
            ValueError: the folder is not a run, or its corpora no longer exist or are not those that it trained on.
        """
        self.folder = folder
        self.config: Config = config_in(folder)
        self.plan: RunPlan = plan_run(self.config)
        # Micro-batches of one sample fit every batch size of a warm-up on any number of ranks
        data = self.config.data.model_copy(update={"micro_batch_size": 1})
        self.batches = TrainBatches(data, self.config.run.seed)
        newest = checkpoint.newest_whole(checkpoint.checkpoints(folder / CHECKPOINTS), checkpoint.problems)
        self._check_corpora(newest)
        branch = self.config.schedule.branch
        self.skipped: SkippedData = skipped_data(folder, newest or (Path(branch.checkpoint) if branch else None))
        self.last_step: int = next((step for step, _ in self._logged()), 0)

    def _logged(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the step and the object of each line of metrics.jsonl, the last line first."""
        file = self.folder / METRICS
        return metrics_from_end(file) if file.exists() else iter(())

    def _loss(self, step: int) -> float | None:
        down_to = takewhile(lambda line: line[0] >= step, self._logged())
        return next((record["loss"] for its, record in down_to if its == step and "loss" in record), None)

    def _check_corpora(self, newest: Path | None) -> None:
        """Refuse corpora whose contents differ from what the run's newest checkpoint recorded."""
        seen = {} if newest is None else checkpoint.read_manifest(newest)["corpora"]
        for name, corpus in self.batches.corpora.items():
            if seen.get(name, corpus.fingerprint) != corpus.fingerprint:
                raise ValueError(
                    f"{corpus}: holds other tokens than when {self.folder} trained on it (fingerprint "
                    f"{corpus.fingerprint}, then {seen[name]}); put the corpus of that time in its place"
                )

    @cached_property
    def decoders(self) -> dict[str, Decoder | None]:
        """Return the decoder of each source."""
        return decoders(self.batches.corpora)

    def step(self, step: int, rank: int | None = None, world_size: int | None = None) -> Step:
        """Return the samples of a step in order, or those of one rank in the order in which it takes them.

        Args:
            step: as in metrics.jsonl, from 1.
            rank: the rank.
            world_size: number of ranks; None uses that of the run's last start.

        Raises:
            ValueError: there is no such step or rank, or the batch does not divide over this many ranks.
        """
        if not 1 <= step <= self.plan.total_steps:
            raise ValueError(f"--step {step}: {self.folder} has steps 1 to {self.plan.total_steps}")
        batches = self.batches
        if rank is not None:
            size = world_size or self._last_world_size()
            if rank >= size:
                raise ValueError(
                    f"--rank {rank}: there were {size} rank(s), from 0 on; --world-size tells of another start"
                )
            batches = TrainBatches(self.config.data, self.config.run.seed, rank, size)
        read = batches.micro_batches(self.skipped.data_step(step - 1))
        samples = [sample for batch in read for sample in of_batch(batch, places(batches, batch))]
        return Step(step, rank, read, samples, self._loss(step))

    def _last_world_size(self) -> int:
        file = self.folder / "environment.json"
        try:
            return int(json.loads(file.read_text(encoding="utf-8"))["world_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: does not say how many ranks there were; give --world-size") from error

    def find(self, text: str, most: int) -> Iterator[tuple[str, Found]]:
        """Yield source and place of up to `most` documents and examples that contain a text.

        Sources whose tokens are not text are skipped with a warning.

        Raises:
            ValueError: no source is text, or the text to find is empty.
        """
        texts = {name: corpus for name, corpus in self.batches.corpora.items() if corpus.tokenizer_path is not None}
        if left := [name for name in self.batches.corpora if name not in texts]:
            LOG.warning(f"--find looks for no text in {', '.join(left)}, which has no tokenizer")
        if not texts:
            raise ValueError(f"--find {text!r}: no source of {self.folder} has a tokenizer, so none holds text")
        found = ((name, it) for name, corpus in texts.items() for it in self._find_in(corpus, text))
        return islice(found, most)

    def _find_in(self, corpus: SampleSource, text: str) -> Iterator[Found]:
        stream = training_stream(corpus, self.config.data)
        packed = stream.windows_with if isinstance(stream, PackedSplit) else None
        return find(corpus, text, self._length, packed)

    @property
    def _length(self) -> int:
        return self.config.data.sequence_length

    def reads(self, source: str, found: Found) -> list[Read]:
        """Return when the windows of a document are read up to the end of the run.

        First come up to LISTED reads of windows with the text itself, then up to LISTED reads of the document's other
        windows, each in the order of training.

        Args:
            source: name of the source.
            found: the document or example that contains the text.
        """
        texts = {*found.text_windows}  # a set: a long document has many windows to look up in it
        others = [window for window in found.windows if window not in texts]
        both = (self._reads(source, found.text_windows, True), self._reads(source, others, False))
        return [read for reads in both for read in sorted(islice(reads, LISTED), key=lambda it: it.sample)]

    def _reads(self, source: str, windows: Sequence[int], holds_text: bool) -> Iterator[Read]:
        order, plan = self.batches.order, self.plan.batch_plan
        place = [its.name for its in order.sources].index(source)
        stop = plan.samples_before(self.skipped.data_step(self.plan.total_steps - 1) + 1)
        for window in windows:
            for epoch, sample in enumerate(order.samples_of(place, window, stop)):
                step = self.skipped.step_of(plan.step_of(sample))
                if step is not None:
                    yield Read(step + 1, sample, epoch, window, holds_text)

    def overview(self) -> dict[str, Any]:
        """Return the steps of the run, and the share of each source."""
        epochs = self.batches.epochs(self.plan.total_steps)
        samples = self.batches.order.samples_per_source(self.plan.batch_plan.samples_before(self.plan.total_steps))
        return {
            "run": str(self.folder),
            "steps": self.plan.total_steps,
            "last_step": self.last_step,
            "tokens": self.plan.total_tokens,
            "sequence_length": self._length,
            "sources": {
                its.name: {
                    "data": str(self.batches.corpora[its.name]),
                    "weight": its.weight,
                    "windows": its.num_windows,
                    "samples": samples[its.name],
                    "epochs": epochs[its.name],
                }
                for its in self.batches.order.sources
            },
        }
