"""Decode the answers of a batch greedily, feeding the model its own tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from plumbline.model.objectives.objective import Batch


def decode_answers(predict: Callable[[Batch], Tensor], batch: Batch, best: Tensor, count: int) -> Tensor:
    """Return the first `count` tokens [B, count] that a model generates where the labels of each row begin.

    Every token takes one more pass over the whole batch, so that all ranks make the same passes. The labels are kept,
    because they place the anchors of an objective that thinks. The output is meaningless for a row without labels, and
    beyond the end of a row.

    Args:
        predict: returns the most likely token after each token of a batch, [B, T].
        batch: one example in each row.
        best: the result of `predict` for the batch.
        count: at least 1.
    """
    tokens, labels, documents, positions = (
        batch[name].to(best.device, copy=True) for name in ("input_ids", "labels", "document_ids", "positions")
    )
    start = (labels >= 0).int().argmax(1, keepdim=True)  # [B, 1]
    place = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    answer = (place > start) & (place < start + count)
    # What follows the labels was padding, a separate document, and is now part of the answer
    documents = torch.where(answer, documents.gather(1, start), documents)
    positions = torch.where(answer, positions.gather(1, start) + (place - start).to(positions.dtype), positions)
    said = []
    for step in range(count):
        if step:
            read = {"input_ids": tokens, "labels": labels, "document_ids": documents, "positions": positions}
            best = predict({**batch, **read})
        here = (start + step).clamp_max(tokens.size(1) - 1)
        token = best.gather(1, here)  # [B, 1]
        said.append(token)
        tokens = torch.where(place == start + step + 1, token, tokens)
    return torch.cat(said, dim=1)
