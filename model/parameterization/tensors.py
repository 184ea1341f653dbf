"""Define what a module states about the tensors that it holds: their roles, their fans and what they start as.

A module of the model lists a `TensorRule` for each of its tensors in the class attribute `tensors`. The rule of a
parameter is that of the innermost module around it that has one, so `self_attn.q_proj.weight` is found in the attention
class and not in `torch.nn.Linear`. Rules go by name and never by shape: under ZeRO-3 a shape is empty until the
parameter is gathered.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from plumbline.model.config import ModelConfig

Role = Literal[
    "embedding",
    "projection",
    "hidden_matrix",
    "hidden_bias",
    "hidden_norm",
    "hidden_scalar",
    "qk_norm",
    "mixing",
    "final_norm",
    "final_scalar",
    "unembedding",
]
Draw = Callable[[tuple[int, ...], float, torch.Generator], Tensor]
"""Shape, standard deviation and generator -> first values."""


def _always(_: ModelConfig) -> bool:
    return True


def _scaled_range(model: ModelConfig, scale: float) -> float:
    return model.initializer_range * scale


@dataclass(frozen=True)
class TensorRule:
    """State what the tensors of one name are to the parameterization."""

    name: str
    """Regular expression over the whole name below the module that states the rule."""
    role: Role
    """Row of the parameterization's table."""
    fans: tuple[str, str] = ("width", "width")
    """Fan-in and fan-out of a matrix (of a bias, of its matrix), as fields of parameterization.Sizes."""
    start: float | Callable[[ModelConfig], float] = 0.0
    """Mean at the start."""
    start_with: str | None = None
    """Name of a tensor further up whose own factor of first values (init_multipliers) multiplies `start`."""
    std: Callable[[ModelConfig, float], float] = _scaled_range
    """Standard deviation at the start, from the parameterization's factor for the role."""
    draw: Draw | None = None
    """How it is drawn; None: normally around `start`."""
    trains: Callable[[ModelConfig], bool] = _always
    """Whether the optimizer sees it."""

    def first_value(self, model: ModelConfig) -> float:
        """Return the mean at the start."""
        return self.start if isinstance(self.start, (int, float)) else self.start(model)


def tensor_rule(module: nn.Module, name: str) -> TensorRule:
    """Return the rule of the parameter `name` of `module`.

    Raises:
        ValueError: no module around the parameter states one.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        owner = module.get_submodule(".".join(parts[:depth]))
        rules: tuple[TensorRule, ...] = getattr(owner, "tensors", ())
        for rule in rules:
            if re.fullmatch(rule.name, ".".join(parts[depth:])):
                return rule
    raise ValueError(
        f"parameter {name!r} has no role: add a TensorRule for it to the class attribute `tensors` of its module"
    )


def matrix_rules(
    name: str, fan_in: str = "width", fan_out: str = "width", trains: Callable[[ModelConfig], bool] = _always
) -> tuple[TensorRule, ...]:
    """Return the rules of a linear layer inside a block: its weight and its bias.

    Args:
        name: regular expression over the layer's name.
        fan_in: field of parameterization.Sizes.
        fan_out: likewise.
        trains: whether the optimizer sees them.
    """
    fans = (fan_in, fan_out)
    return (
        TensorRule(rf"{name}\.weight", "hidden_matrix", fans, trains=trains),
        TensorRule(rf"{name}\.bias", "hidden_bias", fans, trains=trains),
    )


def norm_rules(name: str, start: float | Callable[[ModelConfig], float] = 1.0) -> tuple[TensorRule, ...]:
    """Return the rules of a norm inside a block, whichever model.norm makes it.

    Args:
        name: regular expression over the norm's name.
        start: first value of its gains.
    """
    return (
        # One number for each channel: its gradient shrinks with width
        TensorRule(rf"{name}\.weight", "hidden_norm", start=start),
        TensorRule(rf"{name}\.bias", "hidden_norm"),
        # One number for all channels: its gradient sums over them
        TensorRule(rf"{name}\.scale", "hidden_scalar", start=start),
    )
