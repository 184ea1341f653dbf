"""Compute with rounded weights and inputs in a model whose stored weights stay unchanged.

Rounding happens in the forward pass of the layer that owns the weight, where ZeRO-3 has gathered it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.quantization.quantizer import Grid, Limits, Quantizer


class QuantizedLinear(nn.Linear):
    """Compute a linear layer that rounds its weight and its input in each forward, with straight-through gradients."""

    input_scale: Tensor | None
    """Divisor of the input before rounding, [in_features]; the weight was multiplied by it."""
    grid: Grid | None
    """The grid of a permanently rounded weight, for the quantizer's `blocked` view."""

    def __init__(
        self,
        linear: nn.Linear,
        weights: Quantizer | None,
        activations: Quantizer | None,
        limits: Limits | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        """Replace `linear`, sharing its parameters.

        Args:
            linear: the layer to replace.
            weights: how its weight is rounded; None means not at all, for instance because it already is.
            activations: how its input is rounded.
            limits: limits of the input, measured before (static); None finds them for each input (dynamic).
            input_scale: divisor of the input, [in_features].

        Raises:
            ValueError: a granularity does not apply to weights or activations.
        """
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        if weights is not None:
            weights.check("weights")
        if activations is not None:
            activations.check("activations")
        self.weights, self.activations, self.limits, self.grid = weights, activations, limits, None
        self.register_buffer("input_scale", input_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        if self.input_scale is not None:
            x = x / self.input_scale
        return _rounded_linear(self, self.weights, self.activations, self.limits, x)

    def extra_repr(self) -> str:
        """Return the shapes and formats."""
        return f"{super().extra_repr()}, weights={self.weights}, activations={self.activations}"


@torch.no_grad()
def rounded_weights(layers: nn.Module) -> dict[str, Tensor]:
    """Return the rounded weight of every layer inside `layers` that rounds it, by name."""
    return {
        f"{name}.weight": module.weights.fake_quantize(module.weight, "weights")
        for name, module in layers.named_modules()
        if isinstance(module, QuantizedLinear) and module.weights is not None
    }


def replace_linears(layers: nn.Module, replacement: Callable[[str, nn.Linear], nn.Module]) -> None:
    """Replace every nn.Linear inside `layers` by `replacement`(name, layer); parameters keep their names."""
    for name, module in list(layers.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, child_name, replacement(f"{name}.{child_name}" if name else child_name, child))


@contextmanager
def quantized_linears(layers: nn.Module, weights: Quantizer | None, activations: Quantizer | None) -> Iterator[None]:
    """Make every nn.Linear inside `layers` round its weight and input within a `with` block.

    This is for models whose modules cannot be replaced because DeepSpeed has put hooks on them. Compiled modules run
    uncompiled meanwhile.
    """
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.__dict__["forward"] = partial(_rounded_linear, linear, weights, activations, None)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for linear in linears:
            del linear.__dict__["forward"]  # restores the class's own


def _rounded_linear(
    linear: nn.Linear, weights: Quantizer | None, activations: Quantizer | None, limits: Limits | None, x: Tensor
) -> Tensor:
    weight = linear.weight if weights is None else weights.fake_quantize(linear.weight, "weights")
    x = x if activations is None else activations.fake_quantize(x, "activations", limits)
    return F.linear(x, weight, linear.bias)
