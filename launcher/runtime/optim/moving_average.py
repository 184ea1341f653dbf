"""Keep an exponential moving average of the weights during training, each rank of its own shard.

After t tokens the average is the mean of the weights after every update so far, each weighted by the tokens of its
update and by 2^(-age / half-life), where age is the number of tokens since:

    ema_t = ema_(t-n) + (w_t - ema_(t-n)) (1 - 2^(-n/h)) / (1 - 2^(-t/h))        n tokens per update, half-life h

The denominator is Adam's bias correction: the first update replaces the average, so the initial weights are never in
it. Measured in tokens, the same average is asked for under any batch size. Only updates that were applied count.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plumbline.launcher.runtime.system.collectives import AllRanksError

CHUNK = 2**24  # elements exchanged at a time; bounds the memory that it takes


class MovingAverage:
    """Average an engine's fp32 master weights, in fp32, on the device where they are.

    Args:
        masters: this rank's share of the master weights.
        refresh: makes the engine compute with what has been written into `masters`; all ranks call it together.
        half_life: tokens after which the share of a state of the weights has halved.
    """

    def __init__(self, masters: Sequence[Tensor], refresh: Callable[[], None], half_life: int) -> None:
        self.half_life = half_life
        self.tokens = 0
        """Tokens of the updates in the average; 0: it is a copy of the weights."""
        self._masters, self._refresh = masters, refresh
        self._index = {id(master): index for index, master in enumerate(masters)}
        self._shards = [master.detach().clone() for master in masters]

    @torch.no_grad()
    def update(self, tokens: int) -> None:
        """Take in the weights after an update by a batch of `tokens`: one pass over this rank's shard."""
        self.tokens += tokens
        rate = math.log(2) / self.half_life
        share = math.expm1(-rate * tokens) / math.expm1(-rate * self.tokens)
        for average, master in zip(self._shards, self._masters, strict=True):
            average.lerp_(master, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in the place of the engine's weights, to evaluate or to gather it. Collective, as is leaving.

        The weights come back at the end and after an AllRanksError. They do not after any other exception: that takes
        all ranks, and perhaps only one has failed.
        """
        self._exchange()
        try:
            yield
        except AllRanksError:
            self._exchange()
            raise
        self._exchange()

    def of(self, master: Tensor) -> Tensor:
        """Return the average of one of the master weights, no copy."""
        return self._shards[self._index[id(master)]]

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Forget every update: the average is a copy of the weights as they are now."""
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
