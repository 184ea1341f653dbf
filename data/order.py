"""Map sample number g to a window of a corpus by a pure function: there is no order to store or skip through.

    g -> (source, ordinal in that source), by mixture.py -> (epoch, place) -> window, by a keyed shuffle

Every step is arithmetic on g: sample 10^12 costs the same as sample 0, any rank can compute any sample, and world
size, micro-batch size and interruptions do not appear.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from plumbline.data.indexed import Int64s
from plumbline.data.mixture import Mixture, OrderedSource

UInt64s = npt.NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds. Four give a good shuffle of many items; tiny halves (2 or 3 bits) mix less per round."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the odd number nearest 2^64 / golden ratio: the step of splitmix64

EPOCHS = 256
"""Epochs searched for a window at a time."""

LARGEST = 2**62
"""Largest size that `permute` takes."""


def derive_key(*parts: object) -> int:
    """Return a 64-bit key derived from any printable parts; changing any of them gives an unrelated key."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def subkey(key: int | UInt64s, number: int | Int64s) -> UInt64s:
    """Return element `number` of the splitmix64 stream that starts at `key`: many keys derived from one."""
    with np.errstate(over="ignore"):  # sums and products are modulo 2^64, here and in _scramble
        steps = (np.asarray(number, np.int64).astype(np.uint64) + np.uint64(1)) * GOLDEN
        return _scramble(np.asarray(key, np.uint64) + steps)


def permute(index: npt.ArrayLike, size: npt.ArrayLike, key: int | UInt64s) -> Int64s:
    """Send each index to its place in the permutation of [0, size) that `key` selects.

    A Feistel network is a bijection on the 2h-bit numbers whatever its round function. Where it lands outside
    [0, size), applying it again until it lands inside ("cycle walking") makes it a bijection of [0, size): fewer
    than four applications on average, since 2^2h < 4 x size.

    Args:
        index: Integers in [0, size), of any shape.
        size: From 1 to 2^62; one for all, or an array with one for each index.
        key: 64 bits, see `derive_key`; one for all, or an array with one for each index.

    Returns:
        Integers in [0, size), of the same shape.

    Raises:
        ValueError: `size` or an index is out of range.
    """
    return _walk(index, size, key, _feistel)


def unpermute(place: npt.ArrayLike, size: npt.ArrayLike, key: int | UInt64s) -> Int64s:
    """Return the index that `permute` sends to each place: its inverse, which walks the same cycles backwards."""
    return _walk(place, size, key, _feistel_back)


def _walk(index: npt.ArrayLike, size: npt.ArrayLike, key: int | UInt64s, network: Callable[..., UInt64s]) -> Int64s:
    """Apply a network once, and again to each value that is outside [0, size)."""
    places = np.asarray(index, np.int64)
    sizes = np.broadcast_to(np.asarray(size, np.int64), places.shape).reshape(-1)
    if sizes.size and (sizes.min() < 1 or sizes.max() > LARGEST):
        raise ValueError(f"permute: size from {sizes.min()} to {sizes.max()} is not from 1 to 2^62")
    if places.size and (places.min() < 0 or np.any(places.reshape(-1) >= sizes)):
        raise ValueError(f"permute: index from {places.min()} to {places.max()} is outside [0, size)")
    half_bits = np.maximum(1, (_bit_length(sizes - 1) + 1) // 2).astype(np.uint64)

    value = places.astype(np.uint64).reshape(-1)
    keys = np.broadcast_to(np.asarray(key, np.uint64), places.shape).reshape(-1)
    rounds = np.stack([subkey(keys, number) for number in range(ROUNDS)])
    walking = np.arange(value.size)
    while walking.size:
        value[walking] = network(value[walking], half_bits[walking], rounds[:, walking])
        walking = walking[value[walking] >= sizes[walking].astype(np.uint64)]
    return value.astype(np.int64).reshape(places.shape)


def _bit_length(number: Int64s) -> Int64s:
    """Return the exact bit length of each number, half of its bits at a time because only that fits a float."""
    high = number >> 31
    halves = np.where(high > 0, high, number).astype(np.float64)
    return np.frexp(halves)[1].astype(np.int64) + 31 * (high > 0)


def _feistel(value: UInt64s, half_bits: UInt64s, rounds: UInt64s) -> UInt64s:
    """Run one pass of the network over 2 x half_bits bits: each round swaps the halves and XORs one with a hash."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = value >> half_bits, value & mask
    for key in rounds:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    joined: UInt64s = (left << half_bits) | right
    return joined


def _feistel_back(value: UInt64s, half_bits: UInt64s, rounds: UInt64s) -> UInt64s:
    """Undo one pass of the network, round by round."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = value >> half_bits, value & mask
    for key in rounds[::-1]:
        left, right = right ^ (_scramble(left ^ key) & mask), left
    joined: UInt64s = (left << half_bits) | right
    return joined


def _scramble(value: UInt64s) -> UInt64s:
    """Apply the splitmix64 finalizer: every output bit depends on every input bit."""
    scrambled: UInt64s = value ^ (value >> np.uint64(30))
    scrambled *= np.uint64(0xBF58476D1CE4E5B9)
    scrambled ^= scrambled >> np.uint64(27)
    scrambled *= np.uint64(0x94D049BB133111EB)
    scrambled ^= scrambled >> np.uint64(31)
    return scrambled


@dataclass(frozen=True)
class Location:
    """Hold the locations of samples, in three arrays of the requested shape."""

    source: Int64s
    epoch: Int64s
    window: Int64s


class TrainOrder:
    """Order training samples over a weighted mixture of corpora, endless unless every source has a limit."""

    def __init__(self, sources: Sequence[OrderedSource], seed: int) -> None:
        """Lay out the mixture.

        Raises:
            ValueError: a weight too small for one sample per cycle, or the same corpus twice.
        """
        self.sources = tuple(sources)
        fingerprints = [source.fingerprint for source in sources]
        for position, source in enumerate(sources):
            if (first := fingerprints.index(source.fingerprint)) < position:
                raise ValueError(
                    f"data.train: {sources[first].name} and {source.name} hold the same tokens (bare pairs: documents "
                    "of the same lengths) and would be read in the same order; list the corpus once, with the sum of "
                    "the weights; or, if these are bare pairs of other tokens, both as one source: path: [A, B]"
                )
        self.mixture = Mixture(sources)
        self._num_windows = np.array([source.num_windows for source in sources], np.int64)
        self._keys = np.array([derive_key("samples", seed, each) for each in fingerprints], np.uint64)

    def locate(self, samples: npt.ArrayLike) -> Location:
        """Find samples by their number (0, 1, 2, ...) in constant time and memory per sample.

        Args:
            samples: Integers of any shape.

        Raises:
            ValueError: a sample lies beyond the end of the mixture.
        """
        source, ordinal = self.mixture.draw(samples)
        num_windows = self._num_windows[source]
        epoch, place = np.divmod(ordinal, num_windows)
        return Location(source, epoch, permute(place, num_windows, subkey(self._keys[source], epoch)))

    def samples_of(self, source: int, window: int, stop: int) -> Iterator[int]:
        """Yield, in order, the samples before `stop` that read a given window of a source: one per epoch, see `locate`.

        Args:
            source: index of the source.
            window: number of the window.
            stop: sample before which to end; epochs are computed in blocks, however many there are.
        """
        windows = self.sources[source].num_windows
        epochs = np.arange(EPOCHS)
        while True:
            places = unpermute(np.full(EPOCHS, window), windows, subkey(self._keys[source], epochs))
            for sample in self.mixture.samples_of(source, epochs * windows + places).tolist():
                if sample >= stop:
                    return
                yield sample
            epochs += EPOCHS

    def samples_per_source(self, samples: int) -> dict[str, int]:
        """Return how many of the first `samples` samples come from each corpus."""
        counts = self.mixture.drawn_before(samples)
        return {source.name: int(count) for source, count in zip(self.sources, counts, strict=True)}
