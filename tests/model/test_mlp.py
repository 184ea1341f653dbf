"""Every kind of MLP against its formula."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers.activations import XIELUActivation

from plumbline.model.config import GATED_MLPS, ModelConfig
from plumbline.model.mlp import ACTIVATIONS, MLP, MODULES, XIELU

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
    "relu": lambda x: (x + x.abs()) / 2,
    "relu2": lambda x: x.clamp(min=0) ** 2,
    # slope 1 - 32^-1/2 below zero; E[f(x)^2] = E[x^2] for normal x
    "shaped_relu": lambda x: torch.where(x > 0, x, 0.823223 * x) * math.sqrt(2 / (1 + 0.823223**2)),
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


@torch.no_grad()
def test_xielu_is_the_one_of_transformers(make_config: MakeConfig, enliven: Enliven) -> None:
    mlp = MLP(make_config(mlp="xielu"))
    enliven(mlp)
    assert isinstance(mlp.activation, XIELU)
    stock = XIELUActivation(dtype=torch.float32)
    stock.load_state_dict(dict(mlp.activation.named_parameters()), strict=False)
    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(mlp.activation(x), stock(x), rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_the_input_scale_multiplies_what_the_nonlinearity_sees(make_config: MakeConfig, enliven: Enliven) -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    for kind in ("gelu", "swiglu"):
        mlp = MLP(make_config(mlp=kind, mlp_input_scale=2.0))
        enliven(mlp)
        assert mlp.input_scale is not None
        mlp.input_scale.fill_(1.7)
        inner = mlp.up_proj if mlp.gate_proj is None else mlp.gate_proj
        activated = ACTIVATIONS[kind](1.7 * inner(x)) * (1.0 if mlp.gate_proj is None else mlp.up_proj(x))
        torch.testing.assert_close(mlp(x), mlp.down_proj(activated))


def test_every_kind_is_tested() -> None:
    kinds = {*get_args(ModelConfig.model_fields["mlp"].annotation)}
    assert kinds == {*ACTIVATIONS, *MODULES}
    assert kinds == {*GATED, *PLAIN, "xielu"}, "xielu has a test of its own"
    assert {*GATED} == {*GATED_MLPS}
