"""Loss on held-out text: one definition for the training loop, `eval.py` and everything that compares models."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from data.corpus import Split


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

    def metrics(self, name: str) -> dict[str, float | int]:
        """Entries for metrics.jsonl: eval/NAME/loss and so on."""
        return {f"eval/{name}/{key}": value for key, value in asdict(self).items() if value is not None}


def held_out_loss(
    score: Callable[[Mapping[str, Any]], Tensor],
    batches: Iterable[Mapping[str, Any]],
    split: Split,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    interrupted: Callable[[], bool] = lambda: False,
) -> HeldOutLoss | None:
    """Score batches of a split.

    Args:
        score: summed cross-entropy (nats) and number of valid tokens of a batch, [2].
        batches: this rank's share of the split.
        split: where they come from; knows how many bytes of text it holds.
        total: sums [2] over ranks.
        interrupted: asked before each batch, with the same answer on all ranks.

    Returns:
        The loss over all ranks, or None when interrupted.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        if interrupted():
            return None
        sums += score(batch).double().cpu()
    nats, tokens = total(sums).tolist()
    loss = nats / tokens
    per_byte = None if not split.source_bytes else loss / math.log(2) * split.num_tokens / split.source_bytes
    return HeldOutLoss(loss, math.exp(min(loss, 700.0)), per_byte, round(tokens))
