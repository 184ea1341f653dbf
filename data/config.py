"""Define the `data` section of a configuration: which corpora and tasks, in which shares, in which batch shape."""

from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, Field
from pydantic import model_validator as validator

from plumbline.data.batch_plan import BatchPlan, BatchStage
from plumbline.data.mixture import step_changes
from plumbline.data.paths import HomePath, check_url, is_url, last_part
from plumbline.data.remote.cache import CacheConfig
from plumbline.data.tasks.kinds import AnyTaskConfig


class WeightChange(BaseModel, extra="forbid", frozen=True, strict=True):
    """Change the weight of a source at some point of training."""

    tokens: int = Field(ge=1)
    """Tokens of training, over all sources, after which the weight changes."""

    weight: float = Field(ge=0, le=1e18, allow_inf_nan=False)
    """The new weight; 0 ends the source."""

    over: int = Field(default=0, ge=0)
    """Tokens over which the weight changes linearly. 0: at once."""


class SourceConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Describe one corpus or task and its share of the training samples."""

    path: HomePath | list[HomePath] | None = None
    """A corpus folder made by launcher/prepare.py, or the PREFIX of any Megatron-LM PREFIX.bin/PREFIX.idx pair; a
    folder, a glob or a list of such pairs is read as one, sorted by path. All may be URLs: s3://, gs://, hf://,
    https:// or any other protocol of fsspec. Give this or task."""

    task: AnyTaskConfig | None = Field(default=None, discriminator="name")
    """A task, for example {name: retrieval, pairs: 16}; see data/tasks/README.md. Give this or path."""

    weight: float = Field(default=1.0, ge=0, le=1e18, allow_inf_nan=False)
    """Share of the samples, relative to the other sources; the sum need not be 1. 0 needs `weight_changes` to say when
    the source joins."""

    weight_changes: list[WeightChange] = []
    """Later weights, in ascending order of tokens: for a cooldown or a continued run on another mixture."""

    max_epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The most epochs that the source is read; its weight then goes to the others, in proportion to theirs. None: no
    limit, but a run that would read a corpus more than 40 times is refused."""

    name: str | None = None
    """Label in metrics (eval/NAME/loss); the last part of `path`, or the task's name, when not given."""

    @validator(mode="after")
    def _check(self) -> "SourceConfig":
        if (self.path is None) == (self.task is None):
            task = None if self.task is None else self.task.name
            raise ValueError(f"path = {self.path}, task = {task}: give exactly one of the two")
        if self.path is not None and not (self.paths and all(self.paths)):
            raise ValueError(
                f"path = {self.path!r}: names no corpus; give a folder, a prefix of a pair, or a list of these"
            )
        if self.name == "":
            raise ValueError("name = '': is no label; leave it out, for the last part of path or the task's name")
        for url in filter(is_url, self.paths):
            check_url(url)
        if not self.weight and not any(change.weight for change in self.weight_changes):
            raise ValueError("weight = 0: never read; give a weight above 0, or leave the source out")
        for number, (change, following) in enumerate(pairwise(self.weight_changes)):
            if following.tokens < max(change.tokens + change.over, change.tokens + 1):
                raise ValueError(
                    f"weight_changes[{number + 1}].tokens = {following.tokens}: begins before the change at "
                    f"{change.tokens} tokens is over; list changes in order, each after the one before"
                )
        return self

    def changes(self, length: int) -> tuple[tuple[int, float], ...]:
        """Return (sample, weight) for each change: the first sample of `length` tokens with the new weight."""
        written = []
        for change in self.weight_changes:
            first, end = -(-change.tokens // length), -(-(change.tokens + change.over) // length)
            written.append((first, end - first, change.weight))
        return step_changes(self.weight, written)

    @property
    def paths(self) -> list[str]:
        """Return `path` as a list."""
        return [self.path] if isinstance(self.path, str) else self.path or []

    @property
    def label(self) -> str:
        """Return the source's label in metrics and messages."""
        if self.name is not None:
            return self.name
        if self.task is not None:
            return self.task.name
        return last_part(self.paths[0])


class DataConfig(BaseModel, extra="forbid", frozen=True, strict=True):
    """Configure what the model reads, and in which batch shape."""

    train: list[SourceConfig] = Field(min_length=1)
    """Corpora to train on; each sample comes from exactly one of them."""

    validation: list[SourceConfig] = Field(default=[], json_schema_extra={"shapes": "course"})
    """Corpora to evaluate on, each by its held-out split (a bare Megatron pair and a file of examples have none and are
    read whole). Empty: the held-out split of every training corpus."""

    sequence_length: int = Field(ge=1, le=2**31)
    """Tokens per sample (T); each sample of text reads T + 1 tokens so that every position has a target."""

    global_batch_size: int = Field(ge=1, le=2**31)
    """Sequences per optimizer step, over all ranks and accumulation steps."""

    batch_size_warmup: list[BatchStage] = []
    """Stages of smaller batches before `global_batch_size`, each a divisor of the next. The largest batch that costs no
    quality is small at first and grows (arXiv 2505.23971). schedule.lr_scaling sets the learning rate meanwhile."""

    micro_batch_size: int = Field(ge=1, json_schema_extra={"shapes": "nothing"})
    """Most sequences per rank and forward pass; if that does not divide the batch evenly, the next smaller number that
    does is used. Lower it when memory runs out: the training result does not change."""

    packing: Literal["concat", "best_fit"] = "concat"
    """How documents fill training samples. concat: end to end, cut every `sequence_length` tokens; nothing is padded.
    best_fit: several whole documents to a sample where they fit (arXiv 2404.10830); model.document_mask is then on by
    default. Held-out text is read end to end either way."""

    cache: CacheConfig = Field(default=CacheConfig(), json_schema_extra={"shapes": "nothing"})
    """Where parts of corpora at URLs are kept on this machine, and how many bytes of them."""

    reader_threads: int = Field(default=1, ge=1, json_schema_extra={"shapes": "nothing"})
    """Threads that read ahead, on each rank. One thread reads millions of tokens per second from a local disk; more
    hide the latency of a slow one."""

    @validator(mode="after")
    def _check(self) -> "DataConfig":
        sizes = [*(stage.global_batch_size for stage in self.batch_size_warmup), self.global_batch_size]
        for number, (size, following) in enumerate(pairwise(sizes)):
            if size >= following or following % size:
                raise ValueError(
                    f"batch_size_warmup[{number}].global_batch_size = {size}: must be a smaller divisor of the next "
                    f"batch size, {following}"
                )
        return self

    @property
    def batch_plan(self) -> BatchPlan:
        """Return the plan that says which samples and tokens each step takes."""
        return BatchPlan(self.global_batch_size, self.sequence_length, tuple(self.batch_size_warmup))

    @property
    def held_out_tasks(self) -> dict[str, SourceConfig]:
        """Return the evaluation sources that are tasks, by label."""
        own = [source for source in self.train if source.task is not None and source.task.holds_out]
        return {source.label: source for source in self.validation or own if source.task is not None}

    def micro_batch(self, world_size: int) -> int:
        """Return the sequences per rank and forward pass: `micro_batch_size`, or the next smaller number that fits.

        Raises:
            ValueError: `global_batch_size` is not a multiple of `world_size`.
        """
        per_rank, remainder = divmod(self.global_batch_size, world_size)
        if remainder:
            sizes = sorted({max(1, per_rank) * world_size, (per_rank + 1) * world_size})
            raise ValueError(
                f"data.global_batch_size {self.global_batch_size} is not a multiple of the world size {world_size}; "
                f"set it to {' or '.join(map(str, sizes))}, or use another number of ranks"
            )
        return next(size for size in range(min(self.micro_batch_size, per_rank), 0, -1) if per_rank % size == 0)

    def accumulation_steps(self, world_size: int) -> int:
        """Return the forward passes per rank and optimizer step, after the batch-size warm-up.

        Raises:
            ValueError: `global_batch_size` is not a multiple of `world_size`, or a batch of the warm-up is not a
                multiple of `micro_batch` x `world_size`.
        """
        micro_batch = self.micro_batch(world_size)
        per_pass = micro_batch * world_size
        for number, stage in enumerate(self.batch_size_warmup):
            if stage.global_batch_size % per_pass:
                raise ValueError(
                    f"data.batch_size_warmup[{number}].global_batch_size {stage.global_batch_size} is not a multiple "
                    f"of micro-batches of {micro_batch} x world size {world_size} = {per_pass}; start with a larger "
                    "batch, lower data.micro_batch_size or use fewer ranks"
                )
        return self.global_batch_size // per_pass
