"""Say in words what a configuration asks for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbline.launcher.runtime.config.schema import Config


def describe_settings(config: "Config") -> str:
    """The optimizer's values at the base size as this run uses them, and what the horizon made of those given."""
    used, given = config.base_settings, config.optimizer
    values = f"lr {used.lr:g}, weight decay {used.weight_decay:g}, eps {used.eps:g}, betas {_pair(used.betas)}"
    if config.horizon.rule == "none" and config.horizon.tau is None:
        return values
    tau = "" if config.horizon.tau is None else f", tau {config.horizon.tau:g}"
    return (
        f"{values}; horizon {config.horizon.rule}{tau}: from lr {given.lr:g}, weight decay {given.weight_decay:g}, "
        f"eps {given.eps:g}, betas {_pair(given.betas)}"
    )


def _pair(betas: Sequence[float]) -> str:
    return "/".join(f"{beta:.4g}" for beta in betas)
