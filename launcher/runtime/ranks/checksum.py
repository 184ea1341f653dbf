"""Compute checksums of tensors on their device, so that equal checksums mean equal bits.

This is Fletcher's checksum (IEEE Trans. Commun. 30(1), 1982) over the words w_i of a tensor, each of them an integer of
2 or 4 bytes:

    a = sum_i w_i        b = sum_i i w_i        modulo 2^64

If two tensors of the same shape differ in one or two words, a or b differs: a if the changes do not cancel, else b,
which then differs by the change times the distance of the words, which is less than 2^63. Differences in more words are
missed with a probability of about 2^-64. Both are sums of integers, so they do not depend on the order of summation.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Bytes of an element -> type of the words that it is read as."""
AT_ONCE = 2**24
"""Words that are widened to int64 at once, 128 MiB, since a copy of a whole unembedding would be gigabytes."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a and b of a tensor of any type: [2], int64, on its device, without a synchronization."""
    words = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()])
    # Word i is in row i // width and column i % width, so the sums of rows and columns give b
    width = max(1, math.isqrt(words.numel()))
    whole = words.numel() // width * width
    table, rest = words[:whole].view(-1, width), words[whole:].to(torch.int64)
    of_rows, columns = [], torch.zeros(width, dtype=torch.int64, device=words.device)
    for some in table.split(max(1, AT_ONCE // width)):
        wide = some.to(torch.int64)
        of_rows.append(wide.sum(1))
        columns += wide.sum(0)
    rows = torch.cat(of_rows)
    places = torch.arange(max(rows.numel(), width), device=words.device)
    behind = torch.arange(whole, words.numel(), device=words.device)
    total = rows.sum() + rest.sum()
    weighted = width * (places[: rows.numel()] * rows).sum() + (places[:width] * columns).sum() + (behind * rest).sum()
    return torch.stack((total, weighted))


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the checksums of tensors, perhaps on several devices: [tensors, 2], int64, on `device`."""
    return torch.stack([checksum(tensor).to(device, non_blocking=True) for tensor in tensors])
