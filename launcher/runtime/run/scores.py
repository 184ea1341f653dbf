"""Held-out loss, and exact match on tasks: one definition for the loop, `eval.py` and all that compares models."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.data.streams import WindowStream


@dataclass(frozen=True)
class HeldOutLoss:
    """What a model scores on (a part of) a split."""

    loss: float
    """Mean cross-entropy, nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """loss in bits x the split's tokens per byte of source text: comparable across tokenizers. None: bytes unknown."""
    tokens: int
    """Predicted tokens."""
    examples: int | None = None
    """Of a task: examples with an answer."""
    exact_match: float | None = None
    """Of a task: share of the examples whose every answer token is the likeliest one."""
    accuracy: float | None = None
    """Of a task: share of the answer tokens that are the likeliest ones."""

    def metrics(self, name: str) -> dict[str, float | int]:
        """Entries for metrics.jsonl: eval/NAME/loss and so on; what is known."""
        return {f"eval/{name}/{key}": value for key, value in asdict(self).items() if value is not None}

    @property
    def exact_match_interval(self) -> tuple[float, float] | None:
        """Where exact_match lies for examples without number, at 95 %."""
        if self.exact_match is None or self.examples is None:
            return None
        return wilson_interval(self.exact_match * self.examples, self.examples)

    def describe(self) -> str:
        """In words, for a line of output."""
        per_byte = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        if self.exact_match_interval is None:
            return f"{self.loss:.4f}{per_byte}"
        low, high = self.exact_match_interval
        exact = f"exact match {self.exact_match:.2%} [{low:.2%}, {high:.2%}], accuracy {self.accuracy:.2%}"
        return f"{self.loss:.4f}{per_byte}, {exact}"


def held_out_loss(
    score: Callable[[Mapping[str, Any], bool], Tensor],
    batches: Iterable[Mapping[str, Any]],
    split: WindowStream,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    interrupted: Callable[[], bool] = lambda: False,
) -> HeldOutLoss | None:
    """Score batches of a split.

    Args:
        score: (batch, answers) -> summed cross-entropy (nats) and number of valid tokens of the batch, [2]; with
            answers, what `answer_sums` returns, [5].
        batches: this rank's share of the split.
        split: where they come from: text of known length, or a task with answers.
        total: sums over ranks.
        interrupted: asked before each batch, with the same answer on all ranks.

    Returns:
        The loss over all ranks, or None when interrupted.
    """
    sums = torch.zeros(5 if split.has_answers else 2, dtype=torch.float64)
    for batch in batches:
        if interrupted():
            return None
        sums += score(batch, split.has_answers).double().cpu()
    nats, tokens, *answers = total(sums).tolist()
    loss = nats / tokens
    scores = HeldOutLoss(loss, math.exp(min(loss, 700.0)), split.bits_per_byte(loss), round(tokens))
    if not answers:
        return scores
    right, examples, exact = answers
    return replace(scores, examples=round(examples), exact_match=exact / examples, accuracy=right / tokens)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """The shares of which `successes` out of `trials` are no surprise, at 95 % (Wilson 1927, the score interval).

    Unlike the share with its standard error, it stays within 0 and 1 and does not shrink to a point at either end.
    """
    z = 1.959964  # of the normal distribution, 95 % lie within so many standard deviations
    share, penalty = successes / trials, z**2 / trials
    middle = share + penalty / 2
    half = math.sqrt(share * (1 - share) * penalty + penalty**2 / 4)
    return max(0.0, (middle - half) / (1 + penalty)), min(1.0, (middle + half) / (1 + penalty))


def answer_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """What exact match is made of, [5]: summed cross-entropy (nats), answer tokens, right ones, examples, right ones.

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
    return torch.stack([nats.double(), *(count.double() for count in counts)])
