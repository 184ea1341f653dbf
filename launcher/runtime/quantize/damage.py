"""Measure the cost of rounding: compare a quantized model with its original on the same tokens."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plumbline.data.streams import WindowStream
from plumbline.launcher.runtime.models.open import LoadedModel

RESAMPLES, AT_ONCE = 2000, 100
ENDS = 0.025, 0.975  # quantiles of a 95 % interval


@dataclass(frozen=True)
class Damage:
    """Compare a quantized model with its original on the same predicted tokens. Losses are in nats per token."""

    base_loss: float
    """Mean cross-entropy of the original."""
    loss: float
    """Mean cross-entropy of the quantized model."""
    delta: float
    """loss - base_loss."""
    delta_interval: tuple[float, float]
    """95 % bootstrap interval of delta over sequences, each resampled with both its losses."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """The loss in bits per byte of source text, or None if there is no text."""
    kl: float
    """Mean Kullback-Leibler divergence of the quantized prediction from the original's, nats per token."""
    agreement: float
    """Share of the tokens for which both models have the same top prediction."""
    predicted_tokens: int
    sequences: int


@dataclass(frozen=True)
class SequenceSums:
    """Hold sums over the predicted tokens of each sequence: all [sequences], fp64."""

    tokens: Tensor
    """Number of predicted tokens."""
    base_nats: Tensor
    """Cross-entropy of the original."""
    nats: Tensor
    """Cross-entropy of the quantized model."""
    divergence: Tensor
    """Kullback-Leibler divergence of the quantized prediction from the original's, nats."""
    agreements: Tensor
    """Number of tokens for which both models have the same top prediction."""


@torch.no_grad()
def compare(base: LoadedModel, quantized: LoadedModel, batches: Iterable[Mapping[str, Any]]) -> SequenceSums:
    """Return the sums over each sequence of the batches that has something to predict."""
    rows = []
    for batch in batches:
        labels = batch["labels"].to(base.device)
        logits = [model.logits(batch) for model in (base, quantized)]  # (B, T, V)
        # One sequence at a time: with a large vocabulary, each tensor of the size of the logits takes gigabytes
        rows.append(torch.stack([_sums(*each) for each in zip(labels, *logits, strict=True)]).cpu())
    sums = torch.cat(rows)
    return SequenceSums(*sums[sums[:, 0] > 0].unbind(1))  # rows that only pad the last batch are not sequences


def _sums(labels: Tensor, base_logits: Tensor, logits: Tensor) -> Tensor:
    """Return the sums over the predicted tokens of a sequence, [5], from labels [T] and logits [T, V]."""
    before, after = base_logits.log_softmax(-1), logits.log_softmax(-1)
    targets = labels.clamp_min(0)[:, None]
    columns = (
        torch.ones_like(before[:, 0]),
        -before.gather(-1, targets)[:, 0],
        -after.gather(-1, targets)[:, 0],
        (before.exp() * (before - after)).sum(-1),
        (before.argmax(-1) == after.argmax(-1)).float(),
    )
    return torch.stack([(column.double() * (labels >= 0)).sum() for column in columns])


def damage(sums: SequenceSums, split: WindowStream) -> Damage:
    """Return what `compare` found, over all sequences.

    Args:
        sums: sums over each sequence.
        split: the text.

    Raises:
        ValueError: there is nothing to predict.
    """
    tokens = float(sums.tokens.sum())
    if not tokens:
        raise ValueError(f"{split.name}: no token to predict")
    loss, difference = float(sums.nats.sum()) / tokens, sums.nats - sums.base_nats
    return Damage(
        base_loss=float(sums.base_nats.sum()) / tokens,
        loss=loss,
        delta=float(difference.sum()) / tokens,
        delta_interval=_interval(difference, sums.tokens),
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=split.bits_per_byte(loss),
        kl=float(sums.divergence.sum()) / tokens,
        agreement=float(sums.agreements.sum()) / tokens,
        predicted_tokens=round(tokens),
        sequences=len(sums.tokens),
    )


def _interval(differences: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of the mean difference per token, by a bootstrap over sequences.

    It is a percentile interval (Efron and Tibshirani 1993, section 13.3). Both models see the same sequences, so
    differences in difficulty between texts cancel. A single sequence gives nan.
    """
    if len(tokens) < 2:
        return math.nan, math.nan
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(RESAMPLES // AT_ONCE):  # all at once would take gigabytes for 100,000 sequences
        drawn = torch.randint(len(tokens), (AT_ONCE, len(tokens)), generator=generator)
        means.append(differences[drawn].sum(1) / tokens[drawn].sum(1).clamp_min(1))
    low, high = torch.cat(means).quantile(torch.tensor(ENDS, dtype=torch.float64)).tolist()
    return low, high
