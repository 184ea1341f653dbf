"""Find which window of which corpus is sample number g, by a pure function: there is no order to store or skip.

    g -> slot of a fixed cycle -> (source, ordinal in that source) -> (epoch, place) -> window, by a keyed shuffle

Every step is arithmetic on g: sample 10^12 costs the same as sample 0, any rank can compute any sample, and world
size, micro-batch size and interruptions do not appear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from plumbline.data.indexed import Int64s

UInt64s = npt.NDArray[np.uint64]

CYCLE = 10_000
"""Samples after which the mixture repeats: weights are kept to a hundredth of a percent, exactly, in every cycle."""

ROUNDS = 8
"""Feistel rounds. Four suffice for a good shuffle of many items; tiny halves (2 or 3 bits) mix less per round."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the odd number nearest 2^64 / golden ratio: the step of splitmix64

LARGEST = 2**62
"""Greatest size `permute` takes."""


def derive_key(*parts: object) -> int:
    """Return a 64-bit key from any printable parts; a change in any of them gives an unrelated key."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def subkey(key: int | UInt64s, number: int | Int64s) -> UInt64s:
    """Return element `number` of the splitmix64 stream from `key` on: many keys out of one, by arithmetic alone."""
    with np.errstate(over="ignore"):  # sums and products are meant modulo 2^64, here and in _scramble
        steps = (np.asarray(number, np.int64).astype(np.uint64) + np.uint64(1)) * GOLDEN
        return _scramble(np.asarray(key, np.uint64) + steps)


def permute(index: npt.ArrayLike, size: int, key: int | UInt64s) -> Int64s:
    """Send each index to its place in the permutation of [0, size) that `key` selects.

    A Feistel network is a bijection on the 2h-bit numbers whatever its round function. Where it lands outside
    [0, size), applying it again until it lands inside ("cycle walking") makes it a bijection of [0, size): fewer
    than four applications on average, since 2^2h < 4 x size.

    Args:
        index: Integers in [0, size), of any shape.
        size: From 1 to 2^62.
        key: 64 bits, see `derive_key`; one for all, or an array with one for each index.

    Returns:
        Integers in [0, size), of the same shape.

    Raises:
        ValueError: `size` or an index is out of range.
    """
    places = np.asarray(index, np.int64)
    if not 1 <= size <= LARGEST:
        raise ValueError(f"permute: size {size} is not from 1 to 2^62")
    if places.size and (places.min() < 0 or places.max() >= size):
        raise ValueError(f"permute: index from {places.min()} to {places.max()} is outside [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    value = places.astype(np.uint64).reshape(-1)
    keys = np.broadcast_to(np.asarray(key, np.uint64), places.shape).reshape(-1)
    walking = np.arange(value.size)
    while walking.size:
        value[walking] = _feistel(value[walking], half_bits, keys[walking])
        walking = walking[value[walking] >= size]
    return value.astype(np.int64).reshape(places.shape)


def _feistel(value: UInt64s, half_bits: int, key: UInt64s) -> UInt64s:
    """Run one pass of the network over 2 x half_bits bits: swap the halves, and hide one behind a hash of the other."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_scramble(right ^ subkey(key, number)) & mask)
    joined: UInt64s = (left << bits) | right
    return joined


def _scramble(value: UInt64s) -> UInt64s:
    """Apply the splitmix64 finalizer: every output bit depends on every input bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: UInt64s = value ^ (value >> np.uint64(31))
    return scrambled


@dataclass(frozen=True)
class OrderedSource:
    """State what the order needs to know of one corpus."""

    name: str
    fingerprint: str
    num_windows: int
    """Samples in one epoch."""
    weight: float


@dataclass(frozen=True)
class Location:
    """Hold where some samples lie, in three arrays of the shape that was asked for."""

    source: Int64s
    epoch: Int64s
    window: Int64s


class TrainOrder:
    """Order training samples, without end, over a weighted mixture of corpora."""

    def __init__(self, sources: Sequence[OrderedSource], seed: int) -> None:
        """Lay out one cycle of the mixture.

        Raises:
            ValueError: a weight too small for one sample per cycle, or the same corpus twice.
        """
        self.sources = tuple(sources)
        self.seed = seed
        fingerprints = [source.fingerprint for source in sources]
        for position, source in enumerate(sources):
            if (first := fingerprints.index(source.fingerprint)) < position:
                raise ValueError(
                    f"data.train: {sources[first].name} and {source.name} hold the same tokens and would be read in "
                    "the same order; list the corpus once, with the sum of the weights"
                )
        self._num_windows = np.array([source.num_windows for source in sources], np.int64)
        self._per_cycle = _apportion([source.weight for source in sources], CYCLE)
        for source, count in zip(sources, self._per_cycle, strict=True):
            if count == 0:
                raise ValueError(
                    f"data.train: weight {source.weight} of {source.name} is less than one sample in {CYCLE}; "
                    "raise it or leave the corpus out"
                )
        # Slot j of n for a source wants to be at (j + 1/2) / n of the cycle; sorting the wishes of all sources spreads
        # each one evenly, so that short stretches (a batch) hold the mixture's proportions too.
        source_of = np.repeat(np.arange(len(sources)), self._per_cycle)
        rank_of = np.concatenate([np.arange(count) for count in self._per_cycle])
        slots = np.argsort((rank_of + 0.5) / self._per_cycle[source_of], kind="stable")
        self._source_of_slot: Int64s = source_of[slots]
        self._rank_of_slot: Int64s = rank_of[slots]

    def locate(self, samples: npt.ArrayLike) -> Location:
        """Find samples by their number (0, 1, 2, ... without end) in constant time and memory per sample.

        Args:
            samples: Integers of any shape.
        """
        cycle, slot = np.divmod(np.asarray(samples, np.int64), CYCLE)
        source = self._source_of_slot[slot]
        ordinal = cycle * self._per_cycle[source] + self._rank_of_slot[slot]
        epoch, place = np.divmod(ordinal, self._num_windows[source])
        window = np.empty_like(place)
        for number, its in enumerate(self.sources):
            chosen = source == number
            keys = subkey(derive_key("samples", self.seed, its.fingerprint), epoch[chosen])
            window[chosen] = permute(place[chosen], its.num_windows, keys)
        return Location(source, epoch, window)

    def samples_per_source(self, samples: int) -> dict[str, int]:
        """Return how many of the first `samples` samples come from each corpus."""
        cycles, rest = divmod(samples, CYCLE)
        counts = cycles * self._per_cycle + np.bincount(self._source_of_slot[:rest], minlength=len(self.sources))
        return {source.name: int(count) for source, count in zip(self.sources, counts, strict=True)}


def _apportion(weights: Sequence[float], seats: int) -> Int64s:
    """Return whole numbers [len(weights)] in proportion to the weights that add up to `seats`, by largest remainder."""
    exact = np.array(weights, np.float64) / np.sum(weights) * seats
    counts: Int64s = np.floor(exact).astype(np.int64)
    leftover = np.argsort(counts - exact, kind="stable")[: seats - int(counts.sum())]
    counts[leftover] += 1
    return counts
