"""Cut a token stream into samples: from window positions to the tensors of a batch.

Window k of a stream covers tokens [k*T, k*T + T + 1): T inputs, and the same tokens one later as targets. Neighbours
share one token, so every token of the stream but the first is a target exactly once.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from data.corpus import Split

IGNORED = -100
"""The label that PyTorch's cross-entropy leaves out."""


class Batch(TypedDict):
    """One micro-batch of b samples of T tokens."""

    input_ids: torch.Tensor
    """int64 [b, T]"""
    labels: torch.Tensor
    """int64 [b, T]: the token after each input, already shifted; -100 where there is none."""
    document_ids: torch.Tensor
    """int32 [b, T]: 0, 1, 2, ... within the sample, one more at each document's first token."""
    positions: torch.Tensor
    """int32 [b, T]: distance from the first token of the same document in this sample."""
    sample_index: torch.Tensor
    """int64 [b]: number of the sample in the training order, or of the window in a validation split; -1 in a row that
    only pads the batch."""


def full_windows(num_tokens: int, length: int) -> int:
    """Windows in which every position has a target; a last shorter one is not counted."""
    return max(0, num_tokens - 1) // length


def all_windows(num_tokens: int, length: int) -> int:
    """Windows that together make every token but the first a target; the last may be shorter than `length`."""
    return -(-max(0, num_tokens - 1) // length)


def gather(windows: Sequence[tuple[Split, int] | None], sample_index: Sequence[int], length: int) -> Batch:
    """Read windows into one batch.

    One slice per row, in a loop: as fast as one fancy index over all tokens at T = 256, twice as fast at 4096, and it
    needs no index array that is four times the size of the tokens.

    Args:
        windows: For each row, a split and the number of a window in it; None for a row of padding.
        sample_index: For each row, the number to carry along.
        length: Tokens per row (T).
    """
    rows = len(windows)
    inputs = np.zeros((rows, length), np.int64)  # any valid id pads: nothing is ever computed from it
    labels = np.full((rows, length), IGNORED, np.int64)
    begins = np.zeros((rows, length), np.int32)  # 1 where a document begins inside the row
    for row, window in enumerate(windows):
        if window is None:
            continue
        split, number = window
        start = number * length
        tokens = split.indexed.tokens[start : start + length + 1]
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, : len(tokens) - 1] = tokens[1:]
        begins[row, split.indexed.document_starts(start, start + len(tokens) - 1) - start] = 1
    place = np.arange(length, dtype=np.int32)
    last_begin = np.maximum.accumulate(begins * place, axis=1)
    return Batch(
        input_ids=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        document_ids=torch.from_numpy(np.cumsum(begins, axis=1, dtype=np.int32)),
        positions=torch.from_numpy(place - last_begin),
        sample_index=torch.tensor(sample_index, dtype=torch.int64),
    )
