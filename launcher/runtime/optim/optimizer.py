"""The optimizer: one group for each distinct set of hyperparameters in the parameterization's table.

AdamW updates every tensor, or all but the hidden matrices, which Muon or SOAP take over: by role, never by shape.
Groups are formed by parameter name, before DeepSpeed sees the model, and carry a `name` of their own: DeepSpeed drops
empty groups and flattens the others, so neither position nor shape identifies them later.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import nn

from plumbline.launcher.runtime.optim.muon import ShardedMuon
from plumbline.launcher.runtime.optim.soap import SOAP
from plumbline.model.parameterization.rows import ParameterRow

# The keys that only one optimizer uses, with their defaults
OWN_KEYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"momentum": 0.95},
    "soap": {"precondition_frequency": 10, "max_precondition_dim": 10_000},
}
# Sharding cuts matrices into flat pieces. Muon puts them together again; SOAP's state cannot be cut
ZERO_STAGES = {"adamw": (0, 1, 2, 3), "muon": (0, 1, 2, 3), "soap": (0,)}


class OptimizerConfig(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """The optimizer at the base size; the parameterization scales lr, weight_decay and eps for each role of tensor."""

    name: Literal["adamw", "muon", "soap"] = Field(default="adamw", json_schema_extra={"shapes": "state"})
    """AdamW for everything, or for all but the hidden matrices, which then go to Muon or to SOAP."""
    lr: PositiveFloat
    """Peak learning rate at the base size. Muon's update is scaled to AdamW's RMS, so one value serves both."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay rates of Adam's first and second moment; soap: the second is that of its preconditioners as well."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment, at the base size."""
    weight_decay: NonNegativeFloat = 0.1
    """Coupled decay (a step decays by lr x weight_decay), on matrices and embeddings only."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """muon: Nesterov momentum. Default: 0.95."""
    precondition_frequency: PositiveInt | None = None
    """soap: steps between refreshes of the eigenbases. Default: 10."""
    max_precondition_dim: PositiveInt | None = Field(default=None, json_schema_extra={"shapes": "state"})
    """soap: longer sides of a matrix get no preconditioner (a side of n costs 8 n^2 bytes). Default: 10000."""

    @model_validator(mode="before")
    @classmethod
    def _fill_own_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        own = OWN_KEYS.get(str(values.get("name", "adamw")), {})
        return values | {key: default for key, default in own.items() if values.get(key) is None}

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: both lie in [0, 1)")
        for name, keys in OWN_KEYS.items():
            for key in keys:
                value = getattr(self, key)
                if name != self.name and value is not None:
                    raise ValueError(f"{key} = {value}: only name: {name} uses it, and name is {self.name}; remove it")
        return self


def group_settings(
    rows: Iterable[ParameterRow], optimizer: OptimizerConfig, betas: tuple[float, float]
) -> dict[str, dict[str, Any]]:
    """Name of each group -> its algorithm, its hyperparameters and the names of its parameters.

    Every group has the peak `lr`, `lr_multiplier` and `weight_decay`; the other keys depend on the algorithm. Roles
    that share all of them share a group: ZeRO gathers group by group, so fewer groups are faster.

    Args:
        rows: the parameterization's table.
        optimizer: the optimizer's section of the configuration.
        betas: of Adam's moments, carried over to this batch size and horizon.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for row in rows if row.trainable):
        fixed = _fixed_settings(row, optimizer, betas)
        group = groups.setdefault(tuple(fixed.values()), {"roles": [], "parameters": [], "lr": row.lr, **fixed})
        group["parameters"].append(row.name)
        if row.role not in group["roles"]:
            group["roles"].append(row.role)
    named: dict[str, dict[str, Any]] = {}
    for group in groups.values():
        roles = "+".join(group.pop("roles"))
        # Matrices that scale differently, by their own fans or lr_multipliers, make several groups of one role
        same = sum(name.partition("#")[0] == roles for name in named)
        named[f"{roles}#{same + 1}" if same else roles] = group
    return named


def _fixed_settings(row: ParameterRow, optimizer: OptimizerConfig, betas: tuple[float, float]) -> dict[str, Any]:
    """What stays the same over a run for the group of this row."""
    algorithm = optimizer.name if row.role == "hidden_matrix" else "adamw"
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "lr_multiplier": row.lr_multiplier,
        "weight_decay": row.weight_decay,
    }
    if algorithm != "muon":
        settings |= {"eps": row.eps, "betas": betas}
    return settings | {key: getattr(optimizer, key) for key in OWN_KEYS[algorithm]}


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: the `algorithm` of a group says which of them updates it.

    They have one list of groups and one state between them, looked up anew at each step: DeepSpeed puts other lists
    and other tensors in place, for the time of a step and for good when it loads a checkpoint.

    Args:
        groups: all of them, in the order in which they are to be seen.
        parts: algorithm -> the optimizer that was made with its groups.
    """

    def __init__(self, groups: list[dict[str, Any]], parts: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.parts = parts

    def step(self) -> None:  # type: ignore[override]
        """One update of every group."""
        for algorithm, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state
            part.step()


def make_optimizer(model: nn.Module, settings: dict[str, dict[str, Any]], zero_stage: int) -> torch.optim.Optimizer:
    """Build the optimizer over the groups of `group_settings`: torch's fused AdamW, alone or with Muon or SOAP."""
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for name, wanted in settings.items():
        hyperparameters = {key: value for key, value in wanted.items() if key != "parameters"}
        groups.append({"name": name, "params": [parameters[p] for p in wanted["parameters"]], **hyperparameters})
    adamw = torch.optim.AdamW([group for group in groups if group["algorithm"] == "adamw"], fused=True)
    matrices = [group for group in groups if group["algorithm"] != "adamw"]
    if not matrices:
        return adamw
    matrix_optimizer: torch.optim.Optimizer
    if matrices[0]["algorithm"] == "soap":
        matrix_optimizer = SOAP(matrices)
    elif zero_stage > 0:
        matrix_optimizer = ShardedMuon(matrices)
    else:
        matrix_optimizer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer(groups, {"adamw": adamw, matrices[0]["algorithm"]: matrix_optimizer})


def set_learning_rates(groups: list[dict[str, Any]], base_lr: float) -> None:
    """Write base_lr x the group's multiplier into every group; base_lr is the schedule's value at this step."""
    for group in groups:
        group["lr"] = base_lr * group["lr_multiplier"]


def verify_settings(groups: list[dict[str, Any]], settings: dict[str, dict[str, Any]]) -> None:
    """Refuse to train when the engine's groups are not the ones we asked for, to the last bit."""
    names = [group["name"] for group in groups]
    if names != list(settings):
        raise RuntimeError(f"the engine changed the optimizer's groups: asked for {list(settings)}, found {names}")
    for group in groups:
        for key, value in _fixed(settings[group["name"]]).items():
            if group[key] != value:
                raise RuntimeError(f"group {group['name']}: {key} is {group[key]}, not {value}")


def restore_settings(groups: list[dict[str, Any]], settings: dict[str, dict[str, Any]]) -> None:
    """Write the configuration's hyperparameters over those that a checkpoint brought back."""
    for group in groups:
        group.update(_fixed(settings[group["name"]]))
    verify_settings(groups, settings)


def _fixed(wanted: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters that stay the same over a run."""
    return {key: value for key, value in wanted.items() if key not in ("lr", "parameters")}
