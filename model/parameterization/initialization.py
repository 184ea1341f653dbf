"""What every tensor starts as, and which tensors stay so."""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from plumbline.model.attention.mixing import draw_mixing
from plumbline.model.config import ModelConfig
from plumbline.model.mlp import XIELU
from plumbline.model.parameterization.roles import role_of
from plumbline.model.parameterization.rows import ParameterRow

STARTS: dict[str, float] = {
    "shape_gains": 1.0,
    "value_mix": 0.5,
    "keep_bias": 2.0,  # everything is kept at first (arXiv 2305.15805)
    "alpha_p": math.log(math.expm1(0.8)),  # xIELU takes their softplus
    "alpha_n": math.log(math.expm1(0.8 - XIELU.BETA)),
}


def first_value(name: str, model: ModelConfig) -> float:
    """Mean of a tensor at the start: 0 for matrices and biases, and what the config says for gains."""
    role, leaf = role_of(name), name.rpartition(".")[2]
    if role in ("final_norm", "final_scalar"):
        return 0.0 if leaf == "bias" else 1.0
    if role == "qk_norm" or "_whole_norm." in name:
        return model.qk_norm_init
    if "_layernorm." in name and leaf != "bias":
        ends_branch = "post_feedforward" in name or (
            "post_attention" in name and model.block in ("post_norm", "sandwich_norm")
        )
        return model.branch_gain_init if ends_branch else 1.0
    if "_residual." in name:
        return model.branch_gain_init
    return (model.mlp_input_scale or 1.0) if leaf == "input_scale" else STARTS.get(leaf, 0.0)


def first_std(name: str, model: ModelConfig, scale: float) -> float:
    """Standard deviation of a tensor at the start.

    Args:
        name: of the tensor.
        model: the model's switches.
        scale: what the parameterization makes of `initializer_range` for it.
    """
    if name.endswith(".mixing"):
        return 1 / math.sqrt(model.max_position_embeddings * model.head_dim)
    # Under learned shapes queries start at zero, so that the map starts as the identity
    if model.shaped_gains == "learned" and name.endswith("self_attn.q_proj.weight"):
        return 0.0
    return model.initializer_range * scale


def is_trainable(name: str, model: ModelConfig) -> bool:
    """Whether the optimizer sees a tensor."""
    frozen = [r".*\.mixing"]
    if model.qk_norm_frozen:
        frozen.append(r".*\.[qk]_(whole_)?norm\.weight")
    if model.frozen_qk:
        frozen.append(r".*\.self_attn\.[qk]_proj\..*")
    if model.frozen_mlp:
        frozen.append(r".*\.mlp\..*")
    return not any(re.fullmatch(pattern, name) for pattern in frozen)


def _no_gather(_: nn.Parameter) -> AbstractContextManager[object]:
    return nullcontext()


@torch.no_grad()
def initialize(
    model: nn.Module,
    rows: "Sequence[ParameterRow]",
    seed: int,
    gather: Callable[[nn.Parameter], AbstractContextManager[object]] = _no_gather,
) -> None:
    """Draw every tensor from N(init_mean, init_std^2), or as its role asks; freeze those that do not train.

    Each tensor has a generator of its own, keyed by (seed, name): its values depend neither on the order of
    construction, nor on other tensors, nor on the device.

    Args:
        model: the model whose parameters are filled.
        rows: its parameter table.
        seed: of the run.
        gather: makes a parameter whole for the time of writing to it, where an engine has sharded it.
    """
    parameters = dict(model.named_parameters())
    for row in rows:
        parameter = parameters[row.name]
        parameter.requires_grad_(row.trainable)
        with gather(parameter):
            if row.init_std == 0.0:
                parameter.fill_(row.init_mean)
                continue
            digest = hashlib.sha256(f"{seed}/{row.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            parameter.copy_(_draw(row, generator).view_as(parameter))


def _draw(row: ParameterRow, generator: torch.Generator) -> Tensor:
    if row.role == "mixing":
        return draw_mixing(row.shape, row.init_std, generator)
    if row.role == "projection":  # keeps lengths at every width
        return nn.init.orthogonal_(torch.empty(row.shape), generator=generator)
    return torch.empty(row.shape).normal_(row.init_mean, row.init_std, generator=generator)
