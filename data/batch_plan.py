"""Plan the batch size of every step; nothing else converts between steps, samples and tokens.

Step s trains on global samples [samples_before(s), samples_before(s + 1)), in the order of order.py. With a batch-size
warm-up the first steps are smaller; the order of samples stays the same.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pydantic import BaseModel, PositiveInt


class BatchStage(BaseModel, extra="forbid", frozen=True, strict=True):
    """Describe a smaller batch, used for a while at the start of training."""

    tokens: PositiveInt
    """Tokens that the stage lasts, rounded up to a step at which the next size divides the sequences consumed."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step during the stage; a divisor of the next stage's."""


@dataclass(frozen=True)
class Stage:
    """Hold where the steps of one batch size begin."""

    first_step: int
    first_sample: int
    batch_size: int


@dataclass(frozen=True)
class BatchPlan:
    """Turn steps into samples and tokens, and back, by the batch size of every step.

    Args:
        batch_size: sequences of one step, after the warm-up.
        sequence_length: tokens of one sequence.
        warmup: stages of smaller batches before that, each dividing the next.
    """

    batch_size: int
    sequence_length: int
    warmup: tuple[BatchStage, ...] = ()

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the warm-up, then the full batch, which never ends.

        A stage begins where its batch size divides the samples consumed, so its steps take the same blocks of samples
        as a run that has this batch size from the start.
        """
        stages: list[Stage] = []
        step = sample = 0
        next_sizes = [*(stage.global_batch_size for stage in self.warmup), self.batch_size][1:]
        for stage, next_size in zip(self.warmup, next_sizes, strict=True):
            stages.append(Stage(step, sample, stage.global_batch_size))
            wanted = sample + _divide_up(stage.tokens, self.sequence_length)
            end = _divide_up(wanted, next_size) * next_size
            step, sample = step + (end - sample) // stage.global_batch_size, end
        return (*stages, Stage(step, sample, self.batch_size))

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens in one step of the full batch."""
        return self.batch_size * self.sequence_length

    def batch_size_at(self, step: int) -> int:
        """Return the number of sequences in step `step` (from 0)."""
        return self._stage_of(step).batch_size

    def samples_before(self, step: int) -> int:
        """Return the number of sequences that the first `step` steps consume."""
        stage = self._stage_of(step)
        return stage.first_sample + (step - stage.first_step) * stage.batch_size

    def step_of(self, sample: int) -> int:
        """Return the step (from 0) that takes sample `sample`."""
        stage = self.stages[bisect_right(self.stages, sample, key=lambda stage: stage.first_sample) - 1]
        return stage.first_step + (sample - stage.first_sample) // stage.batch_size

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens that the first `step` steps consume."""
        return self.samples_before(step) * self.sequence_length

    def steps_for(self, tokens: int) -> int:
        """Return the fewest steps that consume at least `tokens` tokens."""
        samples = _divide_up(tokens, self.sequence_length)
        stage = self.stages[bisect_right(self.stages, samples, key=lambda stage: stage.first_sample) - 1]
        return stage.first_step + _divide_up(samples - stage.first_sample, stage.batch_size)

    def describe(self) -> str:
        """Return the batch sizes in one line, each with the step at which it ends."""
        ends = [f"{now.batch_size:,} to step {then.first_step:,}" for now, then in pairwise(self.stages)]
        return ", ".join([*ends, f"{self.batch_size:,} sequences"])

    def _stage_of(self, step: int) -> Stage:
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]


def _divide_up(some: int, size: int) -> int:
    """Return how many times `size` it takes to reach `some`."""
    return -(-some // size)
