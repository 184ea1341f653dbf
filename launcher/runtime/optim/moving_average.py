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
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FOLDER = "ema"  # of a checkpoint, with one file for each rank
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

        After an exception inside, the weights do not come back: that takes all ranks, and perhaps only one has failed.
        """
        self._exchange()
        yield
        self._exchange()

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's shard into a checkpoint.

        Raises:
            OSError: it could not be written.
        """
        (folder / FOLDER).mkdir(exist_ok=True)
        shards = {str(index): shard for index, shard in enumerate(self._shards)}
        facts = {"half_life": str(self.half_life), "tokens": str(self.tokens)}
        try:
            save_file(shards, _file(folder, rank), metadata=facts)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    @torch.no_grad()
    def load(self, folder: Path, rank: int) -> None:
        """Go on from a checkpoint that the engine has loaded; begin anew where it has no average of this half-life."""
        self.tokens = 0
        for average, master in zip(self._shards, self._masters, strict=True):
            average.copy_(master)
        if not _file(folder, rank).is_file():
            return
        with safe_open(_file(folder, rank), framework="pt") as file:
            facts = file.metadata()
            if int(facts["half_life"]) != self.half_life:
                return
            self.tokens = int(facts["tokens"])
            for index, average in enumerate(self._shards):
                average.copy_(file.get_tensor(str(index)))

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self._shards, self._masters, strict=True):
            for ours, theirs in zip(average.view(-1).split(CHUNK), master.view(-1).split(CHUNK), strict=True):
                kept = theirs.clone()
                theirs.copy_(ours)
                ours.copy_(kept)
        self._refresh()


def _file(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank_{rank:05d}.safetensors"
