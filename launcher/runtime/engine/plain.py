"""Train in plain PyTorch in one process: the reference for every other engine.

The training loop runs on either engine: users train with DeepSpeed, and tests compare its runs with those of this
engine. In fp32 they agree up to the order of summation; bf16 is autocast over fp32 weights here, as at ZeRO stage 0.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine, T
from plumbline.launcher.runtime.engine.build import blocks_of, build_for_training
from plumbline.launcher.runtime.engine.memory import choose_recomputed
from plumbline.launcher.runtime.engine.pieces import Piece, replicated
from plumbline.launcher.runtime.optim.clipping import clip_gradients
from plumbline.launcher.runtime.optim.optimizer import group_settings, make_optimizer, verify_settings
from plumbline.launcher.runtime.ranks.world import World
from plumbline.model.objectives.objective import Batch, TrainedLM
from plumbline.model.recomputation import recompute


class PlainEngine(Engine):
    """Train a whole model in this process.

    Args:
        config: the run; only the precision of its deepspeed section is used.
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
        recompute(blocks_of(model), choose_recomputed(config, totals(plan.rows), world))
        self._optimizer = make_optimizer(model, self.settings, sharded=False)
        super().__init__(config, plan, world, model)
        verify_settings(self.groups, self.settings)

    def _expect_micro_batches(self, _count: int) -> None:
        self._optimizer.zero_grad()

    def _accumulate(self, batch: Batch, step: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        losses = self._call(TrainedLM.losses, batch, step)
        (losses.terms * weights).sum().backward()
        return losses.cross_entropy, losses.reports

    def _update(self) -> tuple[Tensor, Tensor]:
        norm = clip_gradients(self.model, self.groups, self.config.optimizer)
        if torch.isfinite(norm):
            self._optimizer.step()
        return norm, torch.isfinite(norm).float()

    def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        with self._forward_context():
            return self.model(*arguments, through=method)  # type: ignore[no-any-return]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups."""
        return self._optimizer.param_groups

    def master_weights(self) -> list[Tensor]:
        """Return the trained parameters."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def refresh_weights(self) -> None:
        """Do nothing: the model computes directly with the master weights."""

    def pieces(self) -> list[Piece]:
        """Return every tensor, whole."""
        return [replicated(name, parameter) for name, parameter in self.model.named_parameters()]

    def _is_whole(self, _parameter: nn.Parameter) -> bool:
        return True

    @property
    def optimizer_state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Return the optimizer's state by parameter."""
        return self._optimizer.state

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a tensor, before clipping."""
        gradient = self.model.get_parameter(name).grad
        assert gradient is not None, "gradients are there between backward and update"
        return gradient
