"""Define optimizers that need whole matrices where an engine has cut them into flat pieces over the ranks.

An engine makes such an optimizer with whole matrices, replaces these by flat shards, and tells it with `attach` where
the pieces lie. What the optimizer does with them is its own affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.ranks.world import World


@dataclass(frozen=True)
class MatrixPieces:
    """Describe where the ranks hold the pieces of one matrix; in rank order they are its elements, row by row."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Start of each rank's piece, in that rank's flat shard."""
    lengths: tuple[int, ...]
    """Length of each rank's piece, in elements; 0 where a rank holds none."""


class WholeMatrixOptimizer(torch.optim.Optimizer, ABC):
    """Update flat shards, knowing which matrices they hold. `attach` must come between sharding and the first step.

    Args:
        groups: matrices, whole.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.matrices: list[list[nn.Parameter]] = [list(group["params"]) for group in self.param_groups]
        """The matrices of each group, which an engine replaces by flat shards."""

    @abstractmethod
    def attach(self, located: Mapping[Tensor, Sequence[MatrixPieces]], world: World) -> None:
        """Take note of where the matrices are.

        Args:
            located: this rank's flat shards, and the matrices in each.
            world: this process among all.
        """
