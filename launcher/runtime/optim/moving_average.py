"""Keep an exponential moving average of the weights during training, each rank of its own shard.

After t tokens the average is the mean of the weights after every update so far, each weighted by the tokens of its
update and by 2^(-age / half-life), where age is the number of tokens since:

    ema_t = ema_(t-n) + (w_t - ema_(t-n)) (1 - 2^(-n/h)) / (1 - 2^(-t/h))        n tokens per update, half-life h

The denominator is Adam's bias correction: the first update replaces the average, so the initial weights are never in
it. A half-life in tokens means the same for any batch size. Only updates that were applied count.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plumbline.launcher.runtime.ranks.collectives import AllRanksError

CHUNK = 2**24  # elements swapped at a time, to bound memory


class MovingAverage:
    """Average an engine's fp32 master weights, in fp32, on the device where they are.

    Args:
        masters: this rank's share of the master weights.
        refresh: makes the engine compute with what was written to `masters`; all ranks call it together.
        half_life: tokens after which the share of an update's weights has halved.
    """

    def __init__(self, masters: Sequence[Tensor], refresh: Callable[[], None], half_life: int) -> None:
        self.half_life = half_life
        self.tokens = 0
        """Tokens of the updates in the average; 0 means it is a copy of the weights."""
        self._masters, self._refresh = masters, refresh
        self._index = {id(master): index for index, master in enumerate(masters)}
        self._shards = [master.detach().clone() for master in masters]

    @torch.no_grad()
    def update(self, tokens: int) -> None:
        """Add the weights after an update by a batch of `tokens`: one pass over this rank's shard."""
        self.tokens += tokens
        rate = math.log(2) / self.half_life
        share = math.expm1(-rate * tokens) / math.expm1(-rate * self.tokens)
        for average, master in zip(self._shards, self._masters, strict=True):
            average.lerp_(master, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the engine's weights by the average, to evaluate or gather it. Entering and leaving are collective.

        The weights are restored at the end and after an AllRanksError. They are not after any other exception:
        restoring takes all ranks, and perhaps only one has failed.
        """
        self._exchange()
        try:
            yield
        except AllRanksError:
            self._exchange()
            raise
        self._exchange()

    def of(self, master: Tensor) -> Tensor:
        """Return the average of one of the master weights, not a copy."""
        return self._shards[self._index[id(master)]]

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Restart the average as a copy of the current weights."""
        self.tokens = 0
        for average, master in zip(self._shards, self._masters, strict=True):
            average.copy_(master)

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self._shards, self._masters, strict=True):
            for ours, theirs in zip(average.view(-1).split(CHUNK), master.view(-1).split(CHUNK), strict=True):
                kept = theirs.clone()
                theirs.copy_(ours)
                ours.copy_(kept)
        self._refresh()
