"""Export norm-free blocks as a stock Qwen3 whose norms are made constant by channels with a large constant.

The stream gets wider: n new channels hold C in every embedding row, and nothing ever writes to them. The root mean
square by which a norm divides is then that of the constants, sqrt(n C^2 / width), to fp32 precision, whatever the other
channels hold, and the norm's gain undoes it. It is chosen to be a power of two, so nothing is rounded.

    constant channels of a norm       gain 0; one reads 1 in the norm before the MLP
    a plain MLP (Qwen3 has gates)     its up_proj is the gate, and up reads that 1
    no final norm                     the final norm is as constant as the others
    a final RMSNorm                   one more MLP unit in the last block writes -C, so it sees the stream alone

This is for inference only, since training would move the constants. It is exact while the stream stays far below them,
see `Headroom`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbline.model.config import ModelConfig
from plumbline.model.decoder import CausalLM
from plumbline.model.export.fold import Weights, fold_multipliers, folded_config
from plumbline.model.export.rotary_classes import QWEN3
from plumbline.model.export.stock import GATED, UNGATED, Export, Headroom, StockClass
from plumbline.model.mlp import ACTIVATIONS
from plumbline.model.parameterization.multipliers import Multipliers

CONSTANT = 2.0**20
SHARE = 64  # one in this many channels is constant; a power of 4, so that the root mean square is a power of two
ROOT = CONSTANT / math.sqrt(SHARE)  # what every norm divides by
EXTRA_UNITS = 64  # MLP units to add: one is used, the rest keep the width a multiple that suits kernels and shards
AT = 64.0  # where the extra unit's activation is exact


def widen_thinker(config: ModelConfig, settings: dict[str, Any], thinker: Weights) -> tuple[dict[str, Any], Weights]:
    """Return the thinker for the wider stream, whose inputs in place of embeddings hold the constants as well."""
    count = constant_channels(config)
    width = SHARE * count
    new = width - config.hidden_size
    wider = {name: tensor if name == "gain" else _columns(tensor, new) for name, tensor in thinker.items()}
    if not config.final_norm:  # the mean square of a state now covers more channels
        wider["gain"] = wider["gain"] * math.sqrt(config.hidden_size / width)
        settings = {**settings, "norm_eps": settings["norm_eps"] * config.hidden_size / width}
    if "projection" in wider:
        wider["projection"] = _rows(wider["projection"], new)
    for name in {"role", "waiting"} & wider.keys():
        wider[name][..., -count:] = CONSTANT
    return settings, wider


def constant_channels(config: ModelConfig) -> int:
    """Return the number of constant channels to add."""
    return math.ceil(config.hidden_size / (SHARE - 1))


@torch.no_grad()
def headroom(model: CausalLM, tokens: Tensor) -> Headroom:
    """Measure the stream of a norm-free model on tokens [B, T]."""
    largest: list[Tensor] = []

    def look(_module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        largest.extend(x.float().square().sum(-1).max() for x in (inputs[0], output))

    residuals = [
        layer.get_submodule(f"{branch}_residual") for layer in model.model.layers for branch in ("attn", "mlp")
    ]
    hooks = [residual.register_forward_hook(look) for residual in residuals]
    model(tokens)
    for hook in hooks:
        hook.remove()
    count = constant_channels(model.config)
    return Headroom(count, float(torch.stack(largest).max()), count * CONSTANT**2 / 2**12)


def _build(config: ModelConfig, folded: Weights) -> Export:
    count = constant_channels(config)
    width = SHARE * count
    new = width - config.hidden_size
    inner = config.intermediate_size + (EXTRA_UNITS if config.final_norm else 0)
    # A final norm over more channels needs a proportionally smaller eps. Qwen3 has one eps for all norms; for those of
    # queries and keys, shrinking their input with it cancels the change
    shrink = math.sqrt(config.hidden_size / width) if config.final_norm else 1.0
    stock = {}
    for name, tensor in folded.items():
        weight = tensor * shrink if ".q_proj." in name or ".k_proj." in name else tensor
        if ".self_attn.o_proj." in name:
            stock[name] = _rows(weight, new)
        elif name.endswith("_proj.weight") or name == "lm_head.weight":
            stock[name] = _columns(weight, new)
        else:
            stock[name] = weight  # per-head norms, whose width is unchanged
    embedding = _columns(folded["model.embed_tokens.weight"], new)
    embedding[:, -count:] = CONSTANT
    stock["model.embed_tokens.weight"] = embedding
    gain = folded["model.norm.weight"] * (shrink if config.final_norm else ROOT)
    stock["model.norm.weight"] = _columns(gain, new)

    constant = _columns(torch.full((config.hidden_size,), ROOT), new)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        stock[f"{layer}.input_layernorm.weight"] = constant.clone()
        before_mlp = constant.clone()
        before_mlp[-1] = ROOT / CONSTANT  # the last channel reads 1
        stock[f"{layer}.post_attention_layernorm.weight"] = before_mlp
        gate, up, down = _gated_mlp(folded, f"{layer}.mlp", new)
        units = inner - len(up)
        gate, up, down = _rows(gate, units), _rows(up, units), _columns(down, units)
        if config.final_norm and i == config.num_hidden_layers - 1:
            gate[-1, -1], up[-1, -1] = AT, 1.0
            down[-count:, -1] = -CONSTANT / ACTIVATIONS[config.mlp](torch.tensor(AT))
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            stock[f"{layer}.mlp.{name}.weight"] = weight
    wider = {"hidden_size": width, "intermediate_size": inner, "norm_eps": config.norm_eps * shrink**2}
    return QWEN3.build(config.model_copy(update=wider), stock)


def _gated_mlp(folded: Weights, mlp: str, new: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up and down of one block in the wider stream."""
    up, down = folded[f"{mlp}.up_proj.weight"], _rows(folded[f"{mlp}.down_proj.weight"], new)
    gate = folded.get(f"{mlp}.gate_proj.weight")
    if gate is not None:
        return _columns(gate, new), _columns(up, new), down
    reader = torch.zeros(len(up), up.size(1) + new)
    reader[:, -1] = 1.0
    return _columns(up, new), reader, down


def _columns(weight: Tensor, new: int) -> Tensor:
    """Append columns of zeros, or entries of a vector."""
    return F.pad(weight, (0, new))


def _rows(weight: Tensor, new: int) -> Tensor:
    """Append rows of zeros, or entries of a vector."""
    return F.pad(weight, (0, new) if weight.ndim == 1 else (0, 0, 0, new))


def _with_final_norm(config: ModelConfig) -> ModelConfig:
    """Return the decoder's configuration with the constant final norm that it gets if it has none."""
    return config.model_copy(update={"final_norm": True})


@dataclass(frozen=True)
class Compat(StockClass):
    """Write norm-free decoders for Qwen3, with channels of constants."""

    is_automatic = False

    def export(self, config: ModelConfig, multipliers: Multipliers, weights: Weights) -> Export:
        """Fold into a final norm (of ones if there is none), which absorbs what a tied head needs."""
        if not config.final_norm:
            weights = {**weights, "model.norm.weight": torch.ones(config.hidden_size)}
        standing = _with_final_norm(config)
        folded = fold_multipliers(weights, standing, multipliers)
        plain = folded_config(standing).model_copy(update={"final_norm": config.final_norm})
        return self.build(plain, folded)

    def state_scale(self, config: ModelConfig, multipliers: Multipliers) -> float:
        """Return the ratio of its final states to ours; it always has a final norm."""
        return super().state_scale(_with_final_norm(config), multipliers)

    def adapt_thinker(
        self, config: ModelConfig, settings: dict[str, Any], thinker: Weights
    ) -> tuple[dict[str, Any], Weights]:
        """Return the thinker for the wider stream."""
        return widen_thinker(config, settings, thinker)

    def headroom(self, model: CausalLM, tokens: Tensor) -> Headroom:
        """Measure the stream on tokens [B, T]."""
        return headroom(model, tokens)


COMPAT = Compat(
    _build,
    {
        "block": ("norm_free",),
        "final_norm": None,
        "mlp": (*GATED, *UNGATED),
        "qk_norm": ("head",),
        "attention_bias": None,
        "sliding_window": None,
    },
)
