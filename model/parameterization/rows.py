"""Define a row of the parameterization's table."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

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
    """Whether the optimizer updates it; a frozen tensor keeps its initial values."""
    lr: float
    lr_multiplier: float
    """lr / base lr: the optimizer's group runs at schedule(t) * lr_multiplier."""
    weight_decay: float
    eps: float
    gradient_growth: float
    """Expected gradient norm of its role relative to the base, if the loss is the same function of its features. If it
    is not 1, a limit on the global gradient norm means something else than at the base."""

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def over_layers(rows: Sequence[ParameterRow]) -> Iterator[ParameterRow]:
    """Merge rows that differ only in the layer number in their name, each at the position of the first."""
    layers: dict[tuple[str, str, ParameterRow], list[int]] = {}
    for row in rows:
        found = re.search(r"(?<=\.)\d+(?=\.)", row.name)
        head, tail = (row.name, "") if found is None else (row.name[: found.start()], row.name[found.end() :])
        numbers = layers.setdefault((head, tail, replace(row, name="")), [])
        if found is not None:
            numbers.append(int(found[0]))
    for (head, tail, row), numbers in layers.items():
        yield replace(row, name=f"{head}{_ranges(numbers)}{tail}")


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as in 0-2,5."""
    runs = ([number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
