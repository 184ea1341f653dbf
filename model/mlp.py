"""The MLP branch: gated (SwiGLU, GeGLU) or plain (GELU, squared ReLU)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu_squared,
}


class MLP(nn.Module):
    """[B, T, hidden_size] -> [B, T, hidden_size] through intermediate_size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.is_gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x [B, T, hidden_size]."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))  # type: ignore[no-any-return]
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
