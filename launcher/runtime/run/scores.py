"""Define held-out loss and exact match on tasks once, for the loop, `eval.py` and all that compares models."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.data.streams import WindowStream

Batch = Mapping[str, Any]  # of tensors: data.windows.Batch, or the same on a device
Reduce = Callable[[list[float]], list[float]]  # numbers of one rank -> their sums over all ranks


@dataclass(frozen=True)
class LossSums:
    """Hold what a mean loss is made of; the sums of several batches or ranks are added before anything is divided."""

    nats: float = 0.0
    """Summed cross-entropy."""
    tokens: float = 0.0
    """Number of valid labels."""

    def __add__(self, other: "LossSums") -> "LossSums":
        """Return the sums over the batches of both."""
        return type(self)(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def total(self, reduce: Reduce) -> "LossSums":
        """Return the sums over all ranks."""
        return type(self)(*reduce(list(astuple(self))))

    def result(self, split: WindowStream) -> "HeldOutLoss":
        """Return the means over the batches of a split."""
        loss = self.nats / self.tokens
        return HeldOutLoss(loss, math.exp(min(loss, 700.0)), split.bits_per_byte(loss), round(self.tokens))


@dataclass(frozen=True)
class AnswerSums(LossSums):
    """Hold what exact match on a task is made of, beside the loss."""

    right_tokens: float = 0.0
    """Number of answer tokens with the largest logit of their position."""
    examples: float = 0.0
    """Number of rows with an answer."""
    right_examples: float = 0.0
    """Number of rows whose every answer token has the largest logit."""

    def result(self, split: WindowStream) -> "HeldOutLoss":
        """Return the means over the examples of a split."""
        return replace(
            super().result(split),
            examples=round(self.examples),
            exact_match=self.right_examples / self.examples,
            accuracy=self.right_tokens / self.tokens,
        )


class Scorer(Protocol):
    """Describe what can be scored: a training engine or an opened model."""

    def evaluate(self, batch: Batch, thinking: bool = False) -> LossSums:
        """Return the sums of the loss on a batch; with `thinking`, by the predictions of an objective that thinks."""

    def evaluate_answers(self, batch: Batch, thinking: bool = False) -> AnswerSums:
        """Return the same on a batch of a task, and how many answers are right."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Hold what a model scores on a split, or on a part of one."""

    loss: float
    """Mean cross-entropy, nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """loss in bits x the split's tokens per byte of source text: comparable across tokenizers. None: bytes unknown."""
    tokens: int
    """Number of predicted tokens."""
    examples: int | None = None
    """Number of examples with an answer; None where there is no task."""
    exact_match: float | None = None
    """Share of the examples of a task whose every answer token is the likeliest one; None where there is no task."""
    accuracy: float | None = None
    """Share of the answer tokens of a task that are the likeliest ones; None where there is no task."""

    def metrics(self, name: str) -> dict[str, float | int]:
        """Return the entries for metrics.jsonl, eval/NAME/loss and so on, as far as they are known."""
        return {f"eval/{name}/{key}": value for key, value in asdict(self).items() if value is not None}

    @property
    def exact_match_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of exact_match over unlimited examples; None without examples."""
        if self.exact_match is None or self.examples is None:
            return None
        return wilson_interval(self.exact_match * self.examples, self.examples)

    def describe(self) -> str:
        """Return the scores in words, for a line of output."""
        per_byte = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        if self.exact_match_interval is None:
            return f"{self.loss:.4f}{per_byte}"
        low, high = self.exact_match_interval
        exact = f"exact match {self.exact_match:.2%} [{low:.2%}, {high:.2%}], accuracy {self.accuracy:.2%}"
        return f"{self.loss:.4f}{per_byte}, {exact}"


def held_out_loss(
    scorer: Scorer,
    batches: Iterable[Batch],
    split: WindowStream,
    thinking: bool = False,
    reduce: Reduce = lambda sums: sums,
) -> HeldOutLoss:
    """Return the loss on batches of a split, over all ranks.

    Args:
        scorer: what is scored.
        batches: this rank's share of the split.
        split: where they come from: text of known length, or a task with answers.
        thinking: score the predictions of an objective that thinks.
        reduce: returns the sums over ranks.
    """
    sums: LossSums = AnswerSums() if split.has_answers else LossSums()
    score: Callable[[Batch, bool], LossSums] = scorer.evaluate_answers if split.has_answers else scorer.evaluate
    for batch in batches:
        sums += score(batch, thinking)
    return sums.total(reduce).result(split)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return the 95 % interval of a share, of `successes` out of `trials` (Wilson 1927, the score interval).

    Unlike the share with its standard error, it stays within 0 and 1 and does not shrink to a point at either end.
    """
    z = 1.959964  # of the normal distribution, 95 % lie within so many standard deviations
    share, penalty = successes / trials, z**2 / trials
    middle = share + penalty / 2
    half = math.sqrt(share * (1 - share) * penalty + penalty**2 / 4)
    return max(0.0, (middle - half) / (1 + penalty)), min(1.0, (middle + half) / (1 + penalty))


def loss_sums(nats: Tensor, labels: Tensor) -> LossSums:
    """Return the sums of a batch from its summed cross-entropy, a scalar in nats, and its labels [B, T]."""
    return LossSums(*torch.stack((nats.double(), (labels >= 0).sum().double())).tolist())


def answer_sums(logits: Tensor, labels: Tensor) -> AnswerSums:
    """Return the sums of a batch of a task.

    An example is a row with an answer; it is right when every one of its answer tokens has the largest logit.

    Args:
        logits: [B, T, V].
        labels: [B, T], -100 where there is no answer.
    """
    asked = labels >= 0
    nats = F.cross_entropy(logits[asked], labels[asked], reduction="sum")
    wrong = asked & (logits.argmax(-1) != labels)
    examples = asked.any(-1)
    counts = [asked.sum(), (asked & ~wrong).sum(), examples.sum(), (examples & ~wrong.any(-1)).sum()]
    return AnswerSums(*torch.stack([nats.double(), *(count.double() for count in counts)]).tolist())
