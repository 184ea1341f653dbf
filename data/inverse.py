"""Find the samples that read a window: the order of order.py, followed backwards.

window -> place, by the inverse of the shuffle -> ordinal in its source -> sample, where the source's count reaches it
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from plumbline.data.indexed import Int64s
from plumbline.data.order import ROUNDS, TrainOrder, UInt64s, _scramble, derive_key, subkey


def unpermute(place: npt.ArrayLike, size: int, key: int | UInt64s) -> Int64s:
    """Return the index that `permute` sends to each place.

    A round of a Feistel network is undone by the same hash, and walking back to the first value within [0, size) undoes
    walking to it.
    """
    places = np.asarray(place, np.int64)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = places.astype(np.uint64).reshape(-1)
    keys = np.broadcast_to(np.asarray(key, np.uint64), places.shape).reshape(-1)
    walking = np.arange(value.size)
    while walking.size:
        value[walking] = _feistel_back(value[walking], half_bits, keys[walking])
        walking = walking[value[walking] >= size]
    return value.astype(np.int64).reshape(places.shape)


def _feistel_back(value: UInt64s, half_bits: int, key: UInt64s) -> UInt64s:
    """Undo one pass of the network, round by round."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for number in reversed(range(ROUNDS)):
        left, right = right ^ (_scramble(left ^ subkey(key, number)) & mask), left
    joined: UInt64s = (left << bits) | right
    return joined


def samples_of(order: TrainOrder, seed: int, source: int, window: int, stop: int) -> Iterator[int]:
    """Yield, in order, the samples before `stop` that read a window of a source: one in each epoch.

    Args:
        order: of the samples.
        seed: of the order.
        source: its place among the sources of the order.
        window: its number.
        stop: sample before which to end.
    """
    its = order.sources[source]
    shuffle = derive_key("samples", seed, its.fingerprint)
    sample = -1
    for epoch in count():
        place = int(unpermute(window, its.num_windows, subkey(shuffle, epoch)))
        ordinal = epoch * its.num_windows + place
        # The first number of samples of which ordinal + 1 are the source's ends with the one that is looked for
        samples = range(stop + 1)
        found = bisect_left(samples, ordinal + 1, lo=sample + 1, key=lambda n: order.samples_per_source(n)[its.name])
        if found > stop:
            return
        sample = found - 1
        yield sample
