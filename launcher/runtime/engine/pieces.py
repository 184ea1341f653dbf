"""Say which part of each tensor a rank keeps, and where: how tensors lie over ranks, as far as a checkpoint asks."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, nn

from plumbline.launcher.runtime.system.world import World


@dataclass(frozen=True)
class Piece:
    """Describe a rank's part of one tensor of the model: a range of the flattened tensor, within a shard."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    shard: Tensor
    """What holds the part, perhaps with those of other tensors: of a trained tensor in fp32, a key of the optimizer's
    state."""
    offset: int
    """Of the part in the flattened shard."""
    start: int
    """Of the part in the flattened tensor."""
    length: int
    """Number of elements; may be 0."""
    trained: bool
    is_replicated: bool = False
    """Whether every rank keeps the same part, all of the tensor."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the part in a tensor that is laid out as the shard, flat and no copy."""
        return flat.detach().view(-1)[self.offset : self.offset + self.length]

    def share(self, world: World) -> "Piece":
        """Return the part for which this rank answers: of what every rank keeps, an even share."""
        if not self.is_replicated:
            return self
        even, rest = divmod(self.length, world.size)
        bounds = list(accumulate((even + (rank < rest) for rank in range(world.size)), initial=0))
        first, last = list(pairwise(bounds))[world.rank]
        return Piece(self.name, self.shape, self.shard, first, first, last - first, self.trained)


def replicated(name: str, parameter: nn.Parameter) -> Piece:
    """Return the piece of a tensor that every rank keeps whole."""
    shape, trained = tuple(parameter.shape), parameter.requires_grad
    return Piece(name, shape, parameter, 0, 0, parameter.numel(), trained, is_replicated=True)
