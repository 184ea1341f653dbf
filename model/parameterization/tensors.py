"""Define what a module states about its tensors: their roles, fans and initial values.

A module lists a `TensorRule` for each of its tensors in the class attribute `tensors`. A parameter gets its rule from
the innermost enclosing module that has one, so that of `self_attn.q_proj.weight` is in the attention class, not in
`torch.nn.Linear`. Rules go by name and never by shape: under ZeRO-3 a shape is empty until the parameter is gathered.
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
    "stream_norm",
    "stream_scalar",
    "qk_norm",
    "mixing",
    "final_norm",
    "final_scalar",
    "unembedding",
]
OF_CONTEXT: tuple[Role, ...] = ("mixing",)
"""Roles of frozen tensors that grow with the square of the context, and are no parameters in the sense of a law."""
Draw = Callable[[tuple[int, ...], float, torch.Generator], Tensor]
"""Shape, standard deviation and generator -> initial values."""


def _always(_: ModelConfig) -> bool:
    return True


def _scaled_range(model: ModelConfig, scale: float) -> float:
    return model.initializer_range * scale


@dataclass(frozen=True)
class TensorRule:
    """State how the parameterization treats tensors of one name."""

    name: str
    """Regular expression that matches the whole name relative to the module with the rule."""
    role: Role
    """Row of the parameterization's table."""
    fans: tuple[str, str] = ("width", "width")
    """Fan-in and fan-out of a matrix (of a bias or gains: of its matrix), as fields of parameterization.Sizes."""
    start: float | Callable[[ModelConfig], float] = 0.0
    """Initial mean."""
    start_with: str | None = None
    """Name of a tensor outside this module whose init_multipliers factor also multiplies `start`."""
    std: Callable[[ModelConfig, float], float] = _scaled_range
    """Initial standard deviation, given the parameterization's factor for the role."""
    draw: Draw | None = None
    """How it is drawn; None: from a normal distribution around `start`."""
    trains: Callable[[ModelConfig], bool] = _always
    """Whether the optimizer updates it."""
    repeats: bool = True
    """Whether, inside the stack, there are as many of it as blocks. The only one of its kind is not scaled with
    depth."""

    def first_value(self, model: ModelConfig) -> float:
        """Return the initial mean."""
        return self.start if isinstance(self.start, (int, float)) else self.start(model)

    def follows_factor(self, model: ModelConfig) -> bool:
        """Return whether the initial standard deviation depends on the parameterization's factor."""
        return self.std(model, 1.0) != self.std(model, 0.0)


def tensor_rule(module: nn.Module, name: str) -> TensorRule:
    """Return the rule of the parameter `name` of `module`.

    Raises:
        ValueError: no enclosing module has one.
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


def freeze(module: nn.Module, model: ModelConfig) -> None:
    """Take the parameters of a model that its configuration keeps as they are out of training."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(tensor_rule(module, name).trains(model))


def matrix_rules(
    name: str, fan_in: str = "width", fan_out: str = "width", trains: Callable[[ModelConfig], bool] = _always
) -> tuple[TensorRule, ...]:
    """Return the rules of a linear layer inside a block: its weight and its bias.

    Args:
        name: regular expression over the layer's name.
        fan_in: field of parameterization.Sizes.
        fan_out: likewise.
        trains: whether the optimizer updates them.
    """
    fans = (fan_in, fan_out)
    return (
        TensorRule(rf"{name}\.weight", "hidden_matrix", fans, trains=trains),
        TensorRule(rf"{name}\.bias", "hidden_bias", fans, trains=trains),
    )


def norm_rules(
    name: str, start: float | Callable[[ModelConfig], float] = 1.0, on_stream: bool = False
) -> tuple[TensorRule, ...]:
    """Return the rules of a norm inside a block, for every kind of model.norm.

    Args:
        name: regular expression over the norm's name.
        start: first value of its gains.
        on_stream: whether the whole stream passes through it, and not only what a branch reads or adds.
    """
    per_channel: Role = "stream_norm" if on_stream else "hidden_norm"
    return (
        # One number per channel, whose gradient shrinks with width
        TensorRule(rf"{name}\.weight", per_channel, start=start),
        TensorRule(rf"{name}\.bias", per_channel),
        # One number for all channels, whose gradient sums over them
        TensorRule(rf"{name}\.scale", "stream_scalar" if on_stream else "hidden_scalar", start=start),
    )
