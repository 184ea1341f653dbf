"""Describe which part of each tensor a rank keeps, and where, as checkpoints need it."""

from dataclasses import dataclass
from itertools import count
from math import gcd

from torch import Tensor, nn

from plumbline.launcher.runtime.ranks.world import World

SAMPLED = 2**20
"""Elements of a piece from which a mean square is taken."""


@dataclass(frozen=True)
class Piece:
    """Describe a rank's part of one tensor of the model: a range of the flattened tensor, within a shard."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    shard: Tensor
    """Tensor that holds the part, perhaps with parts of other tensors. For a trained tensor it is fp32 and a key of the
    optimizer's state."""
    offset: int
    """Start of the part in the flattened shard."""
    start: int
    """Start of the part in the flattened tensor."""
    length: int
    """Number of elements; may be 0."""
    trained: bool
    is_replicated: bool = False
    """Whether every rank keeps the whole tensor."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the part of a tensor with the shard's layout, flat and not a copy."""
        return flat.detach().view(-1)[self.offset : self.offset + self.length]

    def share(self, world: World) -> "Piece":
        """Return the part that this rank is responsible for: an even share of a replicated tensor, else the piece."""
        if not self.is_replicated:
            return self
        even, rest = divmod(self.length, world.size)
        first = world.rank * even + min(world.rank, rest)
        return Piece(self.name, self.shape, self.shard, first, first, even + (world.rank < rest), self.trained)


def sampled(flat: Tensor, width: int) -> Tensor:
    """Return evenly spread elements of a piece, not copied: all, or at most 2^20 of a larger one.

    Their mean square is that of all within about a thousandth, and a copy of them fits beside a model that fills its
    device.

    Args:
        flat: the piece.
        width: columns of its matrix. The distance of the elements has no common divisor with it, so that they come from
            every column.
    """
    least = max(1, -(-flat.numel() // SAMPLED))
    return flat[:: next(step for step in count(least) if gcd(step, width) == 1)]


def stands_for(sample: Tensor, flat: Tensor) -> float:
    """Return how many elements of a piece each one of its sample stands for."""
    return flat.numel() / max(1, sample.numel())


def replicated(name: str, parameter: nn.Parameter) -> Piece:
    """Return the piece of a tensor that every rank keeps whole."""
    shape, trained = tuple(parameter.shape), parameter.requires_grad
    return Piece(name, shape, parameter, 0, 0, parameter.numel(), trained, is_replicated=True)
