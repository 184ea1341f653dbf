"""Train in plain PyTorch and one process, as every other engine must compute it.

The training loop runs on either engine: users train with DeepSpeed, and tests compare its runs with those of this one.
In fp32 they agree up to the order of summation; bf16 is autocast over fp32 weights here, as at ZeRO stage 0.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.build import build_for_training
from plumbline.launcher.runtime.engine.host_memory import copy_to_host
from plumbline.launcher.runtime.engine.interface import Batch, Engine, T
from plumbline.launcher.runtime.optim.clipping import clip_gradients
from plumbline.launcher.runtime.optim.optimizer import (
    group_settings,
    make_optimizer,
    restore_settings,
    verify_settings,
)
from plumbline.launcher.runtime.system.world import World
from plumbline.model.objectives.objective import TrainedLM

FILE = "plain.pt"  # of a checkpoint: weights and optimizer


class PlainEngine(Engine):
    """Train a whole model in this process.

    Args:
        config: the run; its deepspeed section says only the precision.
        world: this process, alone; a process group of one must be up.
        weights: by name, instead of those that the seed draws.

    Raises:
        ValueError: there are other processes.
        ConfigError: see `build_for_training`.
    """

    def __init__(self, config: Config, world: World, weights: Mapping[str, Tensor] | None = None) -> None:
        if world.size > 1:
            raise ValueError(f"the plain engine trains in one process, and this run has {world.size}")
        plan = plan_run(config)
        self.settings = group_settings(plan.rows, config.optimizer, plan.settings.betas)
        model = build_for_training(config, plan.rows, world.device, weights).to(world.device)
        self._optimizer = make_optimizer(model, self.settings, sharded=False)
        super().__init__(config, plan, world, model)
        verify_settings(self.groups, self.settings)

    def _expect_micro_batches(self, _count: int) -> None:
        self._optimizer.zero_grad()

    def _accumulate(self, batch: Batch, step: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        losses = self._call(TrainedLM.losses, batch, step)
        (losses.terms * weights).sum().backward()
        return losses.cross_entropy, losses.reports

    def _update(self) -> tuple[float, bool]:
        norm = clip_gradients(self.model, self.groups, self.config.optimizer).item()
        if math.isfinite(norm):
            self._optimizer.step()
        return norm, math.isfinite(norm)

    def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        autocast: AbstractContextManager[object] = nullcontext()
        if self.config.deepspeed.precision == "bf16":
            autocast = torch.autocast(self.world.device.type, torch.bfloat16)
        with autocast:
            return self.model(*arguments, through=method)  # type: ignore[no-any-return]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups."""
        return self._optimizer.param_groups

    def master_weights(self) -> list[Tensor]:
        """Return the trained parameters."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def refresh_weights(self) -> None:
        """Do nothing: the model computes with the master weights themselves."""

    def master_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and flat weight of every trained tensor."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.detach().flatten()

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a tensor, not clipped yet."""
        gradient = self.model.get_parameter(name).grad
        assert gradient is not None, "gradients are there between backward and update"
        return gradient

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and weight of every tensor, on the CPU."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().float().cpu()

    def snapshot(self) -> dict[str, Any]:
        """Return weights and optimizer state."""
        return {FILE: copy_to_host({"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()})}

    def restore(self, folder: Path) -> None:
        """Read a `snapshot`; the configuration's hyperparameters win over the saved ones."""
        state = torch.load(folder / FILE, map_location=self.world.device)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        restore_settings(self.groups, self.settings)
