"""Every kind of MLP against its formula."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.mlp import ACTIVATIONS, MLP

MakeConfig = Callable[..., ModelConfig]
Enliven = Callable[..., None]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": lambda x: x / (1 + torch.exp(-x)), "geglu": gelu}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [*GATED, *PLAIN])
@torch.no_grad()
def test_an_mlp_is_its_formula(make_config: MakeConfig, enliven: Enliven, kind: str, bias: bool) -> None:
    mlp = MLP(make_config(mlp=kind, mlp_bias=bias, intermediate_size=24))
    enliven(mlp)
    x = 2 * torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    up = mlp.up_proj(x)
    inner = PLAIN[kind](up) if mlp.gate_proj is None else GATED[kind](mlp.gate_proj(x)) * up
    torch.testing.assert_close(mlp(x), mlp.down_proj(inner))
    assert (mlp.up_proj.bias is not None) is bias


def test_every_kind_is_tested() -> None:
    assert {*GATED, *PLAIN} == set(ACTIVATIONS)
