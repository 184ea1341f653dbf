"""Hold one row of the parameterization's table."""

import math
from dataclasses import dataclass

from plumbline.model.parameterization.tensors import Role


@dataclass(frozen=True)
class ParameterRow:
    """Hold what the parameterization decides for one tensor; lr, weight_decay and eps are peak values."""

    name: str
    role: Role
    shape: tuple[int, ...]
    init_mean: float
    init_std: float
    trainable: bool
    """Whether the optimizer sees it; a frozen tensor stays as it was drawn."""
    lr: float
    lr_multiplier: float
    """lr / base lr: the optimizer's group runs at schedule(t) * lr_multiplier."""
    weight_decay: float
    eps: float
    gradient_growth: float
    """Expected norm of the gradients of its role over that at the base: where the loss is the same function of its
    features, what is not 1 changes what a limit on the norm of the whole gradient means."""

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)
