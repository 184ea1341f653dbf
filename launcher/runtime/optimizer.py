"""AdamW with one group for each distinct set of hyperparameters in the parameterization's table.

Groups are formed by parameter name, before DeepSpeed sees the model, and carry a `name` of their own: DeepSpeed drops
empty groups and flattens the others, so neither position nor shape identifies them later.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from launcher.runtime.config import OptimizerConfig
from model.parameterization import AdamSettings, ParameterRow

FIXED = ("lr_multiplier", "weight_decay", "eps", "betas")  # what stays the same over a run, group by group


def base_settings(config: OptimizerConfig) -> AdamSettings:
    """What the parameterization scales."""
    return AdamSettings(lr=config.lr, weight_decay=config.weight_decay, eps=config.eps)


def group_settings(rows: Iterable[ParameterRow], config: OptimizerConfig) -> dict[str, dict[str, Any]]:
    """Name of each group -> its peak lr, lr_multiplier, weight_decay, eps, betas and the names of its parameters.

    Roles that share all hyperparameters share a group: ZeRO gathers group by group, so fewer groups are faster.
    """
    groups: dict[tuple[float, float, float], dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(
            (row.lr_multiplier, row.weight_decay, row.eps),
            {
                "roles": [],
                "parameters": [],
                "lr": row.lr,
                "lr_multiplier": row.lr_multiplier,
                "weight_decay": row.weight_decay,
                "eps": row.eps,
                "betas": tuple(config.betas),
            },
        )
        group["parameters"].append(row.name)
        if row.role not in group["roles"]:
            group["roles"].append(row.role)
    return {"+".join(group.pop("roles")): group for group in groups.values()}


def make_optimizer(model: nn.Module, settings: dict[str, dict[str, Any]]) -> torch.optim.AdamW:
    """Build torch's fused AdamW over the groups of `group_settings`."""
    parameters = dict(model.named_parameters())
    groups = []
    for name, wanted in settings.items():
        hyperparameters = {key: value for key, value in wanted.items() if key != "parameters"}
        groups.append({"name": name, "params": [parameters[p] for p in wanted["parameters"]], **hyperparameters})
    return torch.optim.AdamW(groups, fused=True)


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
        for key in FIXED:
            if group[key] != settings[group["name"]][key]:
                raise RuntimeError(f"group {group['name']}: {key} is {group[key]}, not {settings[group['name']][key]}")


def restore_settings(groups: list[dict[str, Any]], settings: dict[str, dict[str, Any]]) -> None:
    """Write the configuration's hyperparameters over those that a checkpoint brought back."""
    for group in groups:
        group.update({key: settings[group["name"]][key] for key in FIXED})
    verify_settings(groups, settings)
