"""Define held-out loss and exact match on tasks once, for the loop, `eval.py` and all model comparisons."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import islice
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.data.streams import WindowStream
from plumbline.data.tasks.source import TaskStream
from plumbline.data.tasks.task import OwnScore, OwnScores
from plumbline.launcher.runtime.scoring.greedy import decode_answers
from plumbline.model.objectives.objective import Batch

Reduce = Callable[[list[float]], list[float]]  # numbers of one rank -> their sums over all ranks


@dataclass(frozen=True)
class LossSums:
    """Hold the sums behind a mean loss; those of several batches or ranks are added before anything is divided."""

    nats: float = 0.0
    """Summed cross-entropy."""
    tokens: float = 0.0
    """Number of valid labels."""

    def __add__(self, other: "LossSums") -> "LossSums":
        """Return the sums over the batches of both."""
        return type(self)(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def result(self, split: WindowStream) -> "HeldOutLoss":
        """Return the means over the batches of a split."""
        loss = self.nats / self.tokens
        return HeldOutLoss(loss, math.exp(min(loss, 700.0)), split.bits_per_byte(loss), round(self.tokens))


@dataclass(frozen=True)
class AnswerSums(LossSums):
    """Hold the sums behind exact match on a task, in addition to the loss."""

    right_tokens: float = 0.0
    """Number of answer tokens with the largest logit at their position."""
    examples: float = 0.0
    """Number of rows with an answer."""
    right_examples: float = 0.0
    """Number of rows in which every answer token has the largest logit."""

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
        """Return the sums of the loss on a batch; with `thinking`, of predictions with the objective's thoughts."""

    def logits(self, batch: Batch, thinking: bool = False) -> Tensor:
        """Return the logits after each token of a batch, in the same way: [B, T, V], fp32."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Hold a model's scores on a split, or on a part of one."""

    loss: float
    """Mean cross-entropy, nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Loss in bits x the split's tokens per byte of source text, comparable across tokenizers; None if the number of
    bytes is unknown."""
    tokens: int
    """Number of predicted tokens."""
    examples: int | None = None
    """Number of examples with an answer, or None without a task."""
    exact_match: float | None = None
    """Share of a task's examples in which every answer token is the most likely one, or None without a task."""
    accuracy: float | None = None
    """Share of a task's answer tokens that are the most likely ones, or None without a task."""
    own: Mapping[OwnScore, float | None] = field(default_factory=dict)
    """Means of the scores that only some tasks declare, None where this task lacks one."""

    def metrics(self, name: str) -> dict[str, float | int]:
        """Return the known entries for metrics.jsonl, eval/NAME/loss and so on."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "own"}
        return {f"eval/{name}/{key}": value for key, value in {**values, **self.own_means}.items() if value is not None}

    def thinking_metrics(self, name: str) -> dict[str, float | int]:
        """Return the entries of scores with thoughts, eval/NAME/thinking_loss and so on, without what they share."""
        answered = {score.key: mean for score, mean in self.own.items() if score.is_of_answers}
        values = {"loss": self.loss, "exact_match": self.exact_match, **answered, "accuracy": self.accuracy}
        return {f"eval/{name}/thinking_{key}": value for key, value in values.items() if value is not None}

    @property
    def own_means(self) -> dict[str, float | None]:
        """Return the means of the task's own scores, by the end of their keys."""
        return {score.key: mean for score, mean in self.own.items()}

    @property
    def exact_match_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of exact_match over unlimited examples, or None without examples."""
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
        own = "".join(score.words.format(mean) for score, mean in self.own.items() if mean is not None)
        return f"{self.loss:.4f}{per_byte}, {exact}{own}"


def held_out_loss(
    scorer: Scorer,
    batches: Iterable[Batch],
    split: WindowStream,
    thinking: bool = False,
    reduce: Reduce = lambda sums: sums,
) -> HeldOutLoss:
    """Return the loss on batches of a split, over all ranks.

    Args:
        scorer: the engine or model to score.
        batches: this rank's share of the split.
        split: source of the batches: text of known length, or a task with answers.
        thinking: score predictions with the objective's thoughts.
        reduce: returns the sums over ranks.
    """
    sums: LossSums = AnswerSums() if split.has_answers else LossSums()
    own = split.task.own_scores if isinstance(split, TaskStream) else None
    judged = [0.0] * (0 if own is None else len(own.scores))

    def predict(batch: Batch) -> Tensor:
        return scorer.logits(batch, thinking).argmax(-1)

    for batch in batches:
        if not split.has_answers:
            sums += scorer.evaluate(batch, thinking)
            continue
        logits = scorer.logits(batch, thinking)
        found = answer_sums(logits, batch["labels"].to(logits.device))
        best = None if own is None else logits.argmax(-1)
        del logits  # or they stay in memory while those of the next pass are made
        sums += found
        if own is not None:
            solved = not reduce([found.examples - found.right_examples])[0]
            more = _judge(own, batch, predict, None if solved else best)
            judged = [total + value for total, value in zip(judged, more, strict=True)]
    totals = iter(reduce([*astuple(sums), *judged]))
    scores = type(sums)(*islice(totals, len(fields(sums)))).result(split)
    if own is None or scores.examples is None:
        return scores
    means = (None if math.isnan(total) else total / scores.examples for total in totals)
    return replace(scores, own=dict(zip(own.scores, means, strict=True)))


def _judge(own: OwnScores, batch: Batch, predict: Callable[[Batch], Tensor], best: Tensor | None) -> list[float]:
    """Return the sums of a task's own scores over a batch.

    If every token of an answer has the largest logit, greedy decoding gives that answer. If any rank has other answers,
    all ranks decode.

    Args:
        own: the scores.
        batch: one example in each row.
        predict: returns the most likely token after each token of a batch.
        best: those of this batch, or None if the answers of all ranks are right.
    """
    answers = [[label for label in row if label >= 0] for row in batch["labels"].tolist()]
    said = answers if best is None else decode_answers(predict, batch, best, own.longest_answer).tolist()
    rows = zip(batch["sample_index"].tolist(), said, answers, strict=True)
    values = [own.judge(number, mine, true) for number, mine, true in rows if true]
    return [sum(row[place] for row in values) for place in range(len(own.scores))]


def diverged_above(vocab_size: int) -> float:
    """Return the loss, nats per token, above which a run counts as diverged: that of guessing and a nat more."""
    return math.log(vocab_size) + 1


def worse_than_guessing(loss: float, vocab_size: int) -> str | None:
    """Return a warning about a loss, nats per token, by which a run counts as diverged, else None."""
    if not loss > diverged_above(vocab_size):
        return None
    return (
        f"loss {loss:.4g} is above that of guessing (ln(vocab_size) = {math.log(vocab_size):.4g}): the run has "
        "diverged; lower optimizer.lr or lengthen schedule.warmup"
    )


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return the 95 % interval of a share, of `successes` out of `trials` (Wilson 1927, the score interval).

    Unlike the share with its standard error, it stays within 0 and 1 and does not shrink to a point at either end.
    """
    z = 1.959964  # 95 % of the normal distribution lie within this many standard deviations
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
