"""Choose the tokens at which thoughts begin, among those with something to predict.

The choice depends only on the run's seed and the sample's number in the training order, so it is the same for any
number of ranks and after every interruption.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plumbline.model.linear_cross_entropy import IGNORED

AnchorPolicy = Literal["stratified", "response_start", "sequential", "random", "entropy"]

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Anchors:
    """Hold the K anchors of each row."""

    index: Tensor
    """[B, K]: position in the row, ascending; 0 for missing anchors."""
    valid: Tensor
    """[B, K]: whether the anchor exists."""


def text_anchor_problems(policy: AnchorPolicy, text: str | None) -> Iterator[str]:
    """Yield a problem if anchors would begin where labels begin in a text, which is its first token.

    Args:
        policy: how anchors are chosen.
        text: key of the first source whose tokens all have labels, or None if there is none.
    """
    if text is not None and policy in ("response_start", "sequential"):
        yield (
            f"objective.anchor_policy = {policy} begins where labels begin, and in a text ({text}) that is its first "
            "token: set stratified or random"
        )


def choose_anchors(
    policy: AnchorPolicy,
    count: int,
    labels: Tensor,
    draws: Tensor,
    probability: float = 1.0,
    entropy: Tensor | None = None,
) -> Anchors:
    """Choose up to `count` anchors in each row.

    Args:
        policy: stratified: one in each of `count` equal stretches of the tokens with labels, drawn uniformly. entropy:
            the same, drawn in proportion to entropy. response_start: the tokens at which labels begin. sequential: the
            first with labels. random: the first, and random others.
        count: K.
        labels: [B, T]; only a token whose label is not ignored can be an anchor.
        draws: [B, T] in (0, 1), from `uniform`.
        probability: for random: the chance of each token, before the first K in random order are taken.
        entropy: [B, T] in nats, for the policy entropy.
    """
    length = labels.size(1)
    has_target = labels >= 0
    place = torch.arange(length, device=labels.device).expand_as(labels)
    first = has_target & (has_target.cumsum(1) == 1)
    if policy in ("stratified", "entropy"):
        # The probability that u^(1/w) is the largest is proportional to its weight w
        score = draws if entropy is None else draws.log() / entropy.double().clamp_min(1e-9)
        rank = (has_target.cumsum(1) - 1).clamp_min(0)
        stretch = rank * count // has_target.sum(1, keepdim=True).clamp_min(1)
        return _best_of_each(score.double().masked_fill(~has_target, -torch.inf), stretch, count)
    if policy == "random":
        chosen = has_target & (draws < probability)
        score = torch.where(first, 2.0, draws.double()).masked_fill(~(chosen | first), -torch.inf)
    else:
        starts = has_target & ~has_target.roll(1, 1).logical_and(place > 0)
        wanted = starts if policy == "response_start" else has_target
        score = (-place).double().masked_fill(~wanted, -torch.inf)
    best = score.topk(min(count, length), dim=1)
    return _ascending(best.indices, best.values > -torch.inf)


def _best_of_each(score: Tensor, stretch: Tensor, count: int) -> Anchors:
    """Return the best token of each stretch of each row."""
    best = score.new_full((score.size(0), count), -torch.inf).scatter_reduce(1, stretch, score, "amax")
    place = torch.arange(score.size(1), device=score.device).expand_as(stretch)
    wins = (score == best.gather(1, stretch)) & (score > -torch.inf)
    index = place.new_zeros(best.shape).scatter_reduce(1, stretch, place.masked_fill(~wins, 0), "amax")
    return _ascending(index, best > -torch.inf)


def _ascending(index: Tensor, valid: Tensor) -> Anchors:
    last = torch.iinfo(index.dtype).max
    index = index.masked_fill(~valid, last).sort(dim=1).values
    return Anchors(index.masked_fill(index == last, 0), index < last)


def slot_labels(anchors: Anchors, labels: Tensor, document_ids: Tensor, horizon: int) -> Tensor:
    """Return the labels [B, K, horizon] of slots: slot j of a thought predicts the j-th token after its anchor.

    They are -100 beyond the document.

    Args:
        anchors: of the rows.
        labels: [B, T], already shifted: labels[i] is the token after token i.
        document_ids: [B, T].
        horizon: slots of a thought.
    """
    steps = torch.arange(horizon, device=labels.device)
    place = anchors.index[:, :, None] + steps  # [B, K, horizon]: slot j looks from token i + j - 1
    inside = place < labels.size(1)
    flat = place.clamp_max(labels.size(1) - 1).flatten(1)
    targets, documents = (x.gather(1, flat).view_as(place) for x in (labels, document_ids))
    same = documents == document_ids.gather(1, anchors.index)[:, :, None]
    return targets.masked_fill(~(inside & same & anchors.valid[:, :, None]), IGNORED)


def whole_thoughts(labels: Tensor, document_ids: Tensor, horizon: int) -> Tensor:
    """Return the labels [B, T], with -100 for tokens at which a thought would lack a target in some slot."""
    whole = (labels_ahead(labels, document_ids, horizon) >= 0).all(-1)
    return labels.masked_fill(~whole, IGNORED)


def labels_ahead(labels: Tensor, document_ids: Tensor, horizon: int) -> Tensor:
    """Return [B, T, horizon]: the 1st, 2nd, ... token after each token, -100 beyond its document."""
    place = torch.arange(labels.size(1), device=labels.device).expand_as(labels)
    everywhere = Anchors(place, torch.ones_like(place, dtype=torch.bool))
    return slot_labels(everywhere, labels, document_ids, horizon)


def uniform(seed: int, sample_index: Tensor, length: int) -> Tensor:
    """Return random numbers in (0, 1), [B, length] fp64: a pure function of the seed and each sample's number [B]."""
    rows = _mix(sample_index.long() + _signed(seed * _GOLDEN))
    columns = torch.arange(1, length + 1, device=sample_index.device) * _signed(_GOLDEN)
    return ((_mix(rows[:, None] + columns) >> 12 & (2**52 - 1)).double() + 0.5) / 2**52


def _mix(words: Tensor) -> Tensor:
    """Return the splitmix64 finalizer of each word; int64 wraps around as uint64 does.

    `data/order.py` has the same for NumPy arrays. There are two because model must not import data, and torch lacks
    uint64 arithmetic; a test compares them.
    """
    words = (words ^ _shift(words, 30)) * _signed(_MIX_1)
    words = (words ^ _shift(words, 27)) * _signed(_MIX_2)
    return words ^ _shift(words, 31)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return words >> bits & (1 << 64 - bits) - 1


def _signed(word: int) -> int:
    word %= 1 << 64
    return word - (1 << 64) if word >= 1 << 63 else word
