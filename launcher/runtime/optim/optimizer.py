"""Build the optimizer: one group for each distinct set of hyperparameters in the parameterization's table.

A kind (kind.py) updates every tensor, or only the hidden matrices and AdamW the rest, selected by role, never by shape.
Groups are formed by parameter name before DeepSpeed sees the model, and have a `name`: DeepSpeed drops empty groups and
flattens the others, so neither position nor shape identifies them later.
"""

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import nn

from plumbline.launcher.runtime.optim.adamw import ADAMW
from plumbline.launcher.runtime.optim.kind import OptimizerKind
from plumbline.launcher.runtime.optim.muon import MUON, MuonKeys
from plumbline.launcher.runtime.optim.soap import SOAP_KIND, SOAPKeys
from plumbline.model.decoder import CausalLM
from plumbline.model.kinds import kind_named
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table

ALIGNED = 8
"""Elements of the 16 bytes of bf16 that compiled code on a GPU reads at once."""

OPTIMIZERS: dict[str, OptimizerKind] = {kind.name: kind for kind in (ADAMW, MUON, SOAP_KIND)}


class CommonKeys(BaseModel):
    """Hold the keys of the optimizer section that every optimizer uses, at the base size."""

    name: str = Field(default=ADAMW.name, json_schema_extra={"shapes": "state"})
    """Which optimizer: AdamW for everything, or Muon or SOAP for the hidden matrices and AdamW for the rest
    (docs/optimizers.md)."""
    lr: PositiveFloat
    """Peak learning rate at the base size. Muon's update is scaled to AdamW's RMS, so one value serves both."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay rates of Adam's first and second moment; for soap the second is also that of its preconditioners."""
    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment, at the base size."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay as in torch's AdamW: a step shrinks a weight by lr x weight_decay of it. Only matrices and embeddings."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it. 0 turns clipping off."""
    grad_clip_norm: Literal["plain", "base"] = Field(default="plain", json_schema_extra={"shapes": "state"})
    """Norm that grad_clip limits and metrics report. plain: of the gradient itself, whose composition changes with
    model size. base: each role's part is first divided by its expected growth over the base, so that a limit means the
    same at any size."""


class OptimizerConfig(SOAPKeys, MuonKeys, CommonKeys, extra="forbid", frozen=True, strict=True):
    """Configure the optimizer; lr, weight_decay and eps scale from the base size by the role of each tensor."""

    @model_validator(mode="before")
    @classmethod
    def _fill_own_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        own = kind_named(OPTIMIZERS, "name", str(values.get("name", ADAMW.name))).own_keys
        return values | {key: default for key, default in own.items() if values.get(key) is None}

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: both lie in [0, 1)")
        for kind in OPTIMIZERS.values():
            for key in kind.own_keys:
                value = getattr(self, key)
                if kind is not self.kind and value is not None:
                    raise ValueError(
                        f"{key} = {value}: only name: {kind.name} uses it, and name is {self.name}; remove it"
                    )
        return self

    @property
    def kind(self) -> OptimizerKind:
        """Return the declaration of the optimizer."""
        return OPTIMIZERS[self.name]


def group_settings(
    rows: Iterable[ParameterRow], optimizer: OptimizerConfig, betas: tuple[float, float]
) -> dict[str, dict[str, Any]]:
    """Return name of each group -> its algorithm, its hyperparameters and the names of its parameters.

    Every group has the peak `lr`, `lr_multiplier` and `weight_decay`; the other keys depend on the algorithm. Roles
    that share all of them share a group: ZeRO gathers group by group, so fewer groups are faster.

    ZeRO concatenates the tensors of a group. Code compiled for one block also reads those of all other blocks, and
    crashes if one of them is less aligned. So tensors of odd sizes come last, and each begins at a multiple of the
    power of two that divides its size, up to `ALIGNED` elements.

    Args:
        rows: the parameterization's table.
        optimizer: the optimizer's section of the configuration.
        betas: of Adam's moments, scaled to this batch size and horizon.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for row in rows if row.trainable):
        fixed = _fixed_settings(row, optimizer, betas)
        group = groups.setdefault(tuple(fixed.values()), {"roles": [], "parameters": [], "lr": row.lr, **fixed})
        group["parameters"].append(row)
        if row.role not in group["roles"]:
            group["roles"].append(row.role)
    named: dict[str, dict[str, Any]] = {}
    for group in groups.values():
        evenly = sorted(group["parameters"], key=lambda row: -gcd(row.count, ALIGNED))
        group["parameters"] = [row.name for row in evenly]
        roles = "+".join(group.pop("roles"))
        # Matrices of one role that scale differently, by fans or lr_multipliers, are in several groups
        same = sum(name.partition("#")[0] == roles for name in named)
        named[f"{roles}#{same + 1}" if same else roles] = group
    return named


def divided(
    settings: Mapping[str, dict[str, Any]], counts: Mapping[str, int], elements: int
) -> dict[str, dict[str, Any]]:
    """Return groups of at least `elements` elements, into which those of `group_settings` are divided in their order.

    The backward pass completes the last tensors of a group first, and then the engine can sum their gradients over
    ranks while the others are computed. So a remainder that is smaller comes first in its group.

    Args:
        settings: the groups by name.
        counts: elements of each tensor by name.
        elements: least number in a group.
    """
    found = {}
    for name, group in settings.items():
        parts: list[list[str]] = []
        missing = 0
        for parameter in reversed(group["parameters"]):
            if missing <= 0:
                parts.insert(0, [])
                missing = elements
            parts[0].insert(0, parameter)
            missing -= counts[parameter]
        for number, part in enumerate(parts, 1):
            found[name if len(parts) == 1 else f"{name}/{number}"] = group | {"parameters": part}
    return found


def _fixed_settings(row: ParameterRow, optimizer: OptimizerConfig, betas: tuple[float, float]) -> dict[str, Any]:
    """Return the settings of this row's group that are constant over a run."""
    chosen = optimizer.kind
    kind = chosen if chosen.all_tensors or row.role == "hidden_matrix" else ADAMW
    known: dict[str, Any] = {"eps": row.eps, "betas": betas}
    return {
        "algorithm": kind.name,
        "lr_multiplier": row.lr_multiplier,
        "weight_decay": row.weight_decay,
        **{key: value for key, value in known.items() if key in kind.reads},
        **({"gradient_growth": row.gradient_growth} if optimizer.grad_clip_norm == "base" else {}),
        **{key: getattr(optimizer, key) for key in kind.own_keys},
    }


class CombinedOptimizer(torch.optim.Optimizer):
    """Combine several optimizers into one: the `algorithm` of a group says which of them updates it.

    They share one list of groups and one state, which are looked up at each step because DeepSpeed replaces lists and
    tensors, during a step and permanently when it loads a checkpoint.

    Args:
        groups: all groups, in their final order.
        parts: algorithm -> the optimizer that was made with its groups.
    """

    def __init__(self, groups: list[dict[str, Any]], parts: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.parts = parts

    def step(self) -> None:  # type: ignore[override]
        """Update every group once."""
        for algorithm, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state
            part.step()


def make_optimizer(model: nn.Module, settings: dict[str, dict[str, Any]], sharded: bool) -> torch.optim.Optimizer:
    """Build the optimizer over the groups of `group_settings`: one, or AdamW and one for the hidden matrices.

    Args:
        model: the model to train.
        settings: of the groups.
        sharded: whether an engine will replace the parameters by flat shards, as ZeRO does from stage 1 on.
    """
    groups = _with_parameters(model, settings)
    parts: dict[str, torch.optim.Optimizer] = {}
    for kind in OPTIMIZERS.values():
        own = [group for group in groups if group["algorithm"] == kind.name]
        if own:
            parts[kind.name] = kind.make(own, sharded)
    return CombinedOptimizer(groups, parts) if len(parts) > 1 else next(iter(parts.values()))


def parameter_groups(
    model: CausalLM,
    parameterization: ParameterizationConfig,
    lr: float,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.95),
) -> list[dict[str, Any]]:
    """Return the groups of a model for AdamW in a custom training loop: torch.optim.AdamW(groups).

    Each group's lr is its peak, which torch's schedulers multiply; `lr_multiplier` is its ratio to `lr`. In a group,
    tensors of odd sizes come last (`group_settings`), which matters because torch saves optimizer states by position.

    Args:
        model: a model from `build_decoder` or `load_model`, with this parameterization.
        parameterization: scales the settings below, which are those tuned at its base size.
        lr: peak learning rate.
        weight_decay: as in torch, where a step shrinks a weight by lr x weight_decay of it.
        eps: of AdamW.
        betas: of AdamW.
    """
    optimizer = OptimizerConfig(lr=lr, weight_decay=weight_decay, eps=eps, betas=list(betas))
    rows = parameter_table(model.config, parameterization, OptimizerSettings(lr, weight_decay, eps, betas))
    return _with_parameters(model, group_settings(rows, optimizer, betas))


def _with_parameters(model: nn.Module, settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of `group_settings` in torch's form, with parameters instead of names."""
    parameters = dict(model.named_parameters())
    groups = []
    for name, wanted in settings.items():
        hyperparameters = {key: value for key, value in wanted.items() if key != "parameters"}
        groups.append({"name": name, "params": [parameters[p] for p in wanted["parameters"]], **hyperparameters})
    return groups


def set_learning_rates(groups: list[dict[str, Any]], base_lr: float) -> None:
    """Write base_lr x the group's multiplier into every group; base_lr is the schedule's value at this step."""
    for group in groups:
        group["lr"] = base_lr * group["lr_multiplier"]


def verify_settings(groups: list[dict[str, Any]], settings: dict[str, dict[str, Any]]) -> None:
    """Refuse to train if the engine's groups are not bit for bit those that were requested."""
    names = [group["name"] for group in groups]
    if names != list(settings):
        raise RuntimeError(f"the engine changed the optimizer's groups: asked for {list(settings)}, found {names}")
    for group in groups:
        for key, value in _fixed(settings[group["name"]]).items():
            if group[key] != value:
                raise RuntimeError(f"group {group['name']}: {key} is {group[key]}, not {value}")


def _fixed(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that are constant over a run."""
    return {key: value for key, value in wanted.items() if key not in ("lr", "parameters")}
