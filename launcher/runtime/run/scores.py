"""Define held-out loss and exact match on tasks once, for the loop, `eval.py` and all model comparisons."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.data.streams import WindowStream
from plumbline.data.tasks.candidates import CandidatesConfig
from plumbline.data.tasks.source import TaskStream
from plumbline.launcher.runtime.run.greedy import decode_answers
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

    def total(self, reduce: Reduce) -> "LossSums":
        """Return the sums over all ranks."""
        return type(self)(*reduce(list(astuple(self))))

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
    right_conclusions: float = 0.0
    """Number of rows in which the decoded answer ends in the right candidate, whatever its steps."""
    right_deeper: float = 0.0
    """Number of rows in which the deeper candidate is right, plus half of those in which both are equally deep."""

    def result(self, split: WindowStream) -> "HeldOutLoss":
        """Return the means over the examples of a split."""
        scores = replace(
            super().result(split),
            examples=round(self.examples),
            exact_match=self.right_examples / self.examples,
            accuracy=self.right_tokens / self.tokens,
        )
        task = candidates_of(split)
        if task is None:
            return scores
        deeper = None if task.deeper_candidate(0) is None else self.right_deeper / self.examples
        return replace(scores, answer_match=self.right_conclusions / self.examples, deeper_candidate=deeper)


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
    answer_match: float | None = None
    """Share of the examples whose greedily decoded answer ends in the right one of two candidates, whatever its steps,
    or None without candidates."""
    deeper_candidate: float | None = None
    """Share of the examples that are right without reading the question's root, if one chooses the deeper candidate
    (at random between equals), or None if that is a guess."""

    def metrics(self, name: str) -> dict[str, float | int]:
        """Return the known entries for metrics.jsonl, eval/NAME/loss and so on."""
        return {f"eval/{name}/{key}": value for key, value in asdict(self).items() if value is not None}

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
        ends = "" if self.answer_match is None else f", answer match {self.answer_match:.2%}"
        rule = "" if self.deeper_candidate is None else f" (the deeper candidate: {self.deeper_candidate:.2%})"
        return f"{self.loss:.4f}{per_byte}, {exact}{ends}{rule}"


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
    task, predict = candidates_of(split), partial(scorer.logits, thinking=thinking)
    for batch in batches:
        if not split.has_answers:
            sums += scorer.evaluate(batch, thinking)
            continue
        logits = predict(batch)
        found = answer_sums(logits, batch["labels"].to(logits.device))
        sums += found if task is None else _with_choices(found, task, batch, predict, logits, reduce)
    return sums.total(reduce).result(split)


def candidates_of(split: WindowStream) -> CandidatesConfig | None:
    """Return the task of a split that asks which of two candidates is right, or None if it is not such a task."""
    return split.task if isinstance(split, TaskStream) and isinstance(split.task, CandidatesConfig) else None


def _with_choices(
    found: AnswerSums,
    task: CandidatesConfig,
    batch: Batch,
    predict: Callable[[Batch], Tensor],
    logits: Tensor,
    reduce: Reduce,
) -> AnswerSums:
    """Return the sums of a batch, including those for choices between two candidates: the model's, and the deeper one.

    If every token of an answer has the largest logit, greedy decoding gives that answer. If any rank has other answers,
    all ranks decode.
    """
    deeper = sum(task.deeper_candidate(number) or 0.0 for number in batch["sample_index"].tolist() if number >= 0)
    found = replace(found, right_conclusions=found.right_examples, right_deeper=deeper)
    if not reduce([found.examples - found.right_examples])[0]:
        return found
    said = decode_answers(predict, batch, logits, task.longest_answer).tolist()
    answers = [[label for label in row if label >= 0] for row in batch["labels"].tolist()]
    right = sum(task.conclusion(row) == true[-1] for row, true in zip(said, answers, strict=True) if true)
    return replace(found, right_conclusions=float(right))


def worse_than_guessing(loss: float, vocab_size: int) -> str | None:
    """Return a warning about a loss, nats per token, that exceeds that of guessing by at least a nat, else None."""
    guessing = math.log(vocab_size)
    if not loss > guessing + 1:
        return None
    return (
        f"loss {loss:.4g} is above that of guessing (ln(vocab_size) = {guessing:.4g}): the run has diverged; lower "
        "optimizer.lr or lengthen schedule.warmup"
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
