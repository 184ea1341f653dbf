"""Define the MLP branch: gated (SwiGLU, GeGLU) or plain (GELU, ReLU, squared ReLU, shaped ReLU, xIELU)."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbline.model.config import ModelConfig
from plumbline.model.parameterization.tensors import TensorRule, matrix_rules


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _trains(model: ModelConfig) -> bool:
    return not model.frozen_mlp


class ShapedReLU(nn.Module):
    """Apply a leaky ReLU of slope 1 - 1/sqrt(width) that preserves the second moment (arXiv 2306.17759, section 3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.slope = 1 - config.hidden_size**-0.5
        self.gain = math.sqrt(2 / (1 + self.slope**2))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return F.leaky_relu(x, self.slope) * self.gain


class XIELU(nn.Module):
    """Compute xIELU (arXiv 2411.13010): a_p x^2 + x/2 above zero, a_n (exp(x) - 1) - a_n x + x/2 below.

    a_p = softplus(alpha_p) and a_n = 1/2 + softplus(alpha_n) are learned. As in Apertus, both start at 0.8.
    """

    BETA, EPS = 0.5, -1e-6
    tensors = (  # for which softplus gives 0.8 in both formulas
        TensorRule("alpha_p", "hidden_scalar", start=math.log(math.expm1(0.8)), trains=_trains),
        TensorRule("alpha_n", "hidden_scalar", start=math.log(math.expm1(0.8 - BETA)), trains=_trains),
    )

    def __init__(self, _config: ModelConfig) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        positive, negative = F.softplus(self.alpha_p), self.BETA + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.clamp(x, max=self.EPS)) - x) * negative
        return torch.where(x > 0, positive * x * x, below) + self.BETA * x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu_squared,
}
"""Nonlinearities by the value of model.mlp."""
MODULES: dict[str, Callable[[ModelConfig], nn.Module]] = {"shaped_relu": ShapedReLU, "xielu": XIELU}
"""Those that depend on the model's shape, or learn."""


def _activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    return MODULES[config.mlp](config) if config.mlp in MODULES else ACTIVATIONS[config.mlp]


def _first_input_scale(model: ModelConfig) -> float:
    return model.mlp_input_scale or 1.0


class MLP(nn.Module):
    """Map [B, T, hidden_size] -> [B, T, hidden_size] through intermediate_size."""

    tensors = (
        *matrix_rules("(gate|up)_proj", "width", "intermediate", _trains),
        *matrix_rules("down_proj", "intermediate", "width", _trains),
        TensorRule("input_scale", "hidden_scalar", start=_first_input_scale, trains=_trains),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.is_gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = _activation(config)
        self.input_scale = None if config.mlp_input_scale is None else nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x [B, T, hidden_size]."""
        inner = self.up_proj if self.gate_proj is None else self.gate_proj
        activated = inner(x) if self.input_scale is None else inner(x) * self.input_scale
        activated = self.activation(activated)
        if self.gate_proj is not None:
            activated = activated * self.up_proj(x)
        return self.down_proj(activated)  # type: ignore[no-any-return]
