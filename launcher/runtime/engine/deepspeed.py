"""Train with DeepSpeed, with nothing left to its defaults.

DeepSpeed silently accepts unknown keys, and its defaults change between releases. So its configuration is generated
here with every key that matters, what took effect is read back after `initialize`, and a mismatch is an error.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.plan import RunPlan, plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine import deepspeed_fixes, zero_shards
from plumbline.launcher.runtime.engine.base import Engine, T
from plumbline.launcher.runtime.engine.buckets import buckets, sends_gradients, sums_shares
from plumbline.launcher.runtime.engine.build import blocks_of, build_for_training, compiles, move_buffers
from plumbline.launcher.runtime.engine.gradient_shares import GradientShares
from plumbline.launcher.runtime.engine.memory import choose_recomputed
from plumbline.launcher.runtime.engine.on_device import deciding_on_device, not_finite
from plumbline.launcher.runtime.engine.pieces import Piece
from plumbline.launcher.runtime.optim.clipping import base_equivalent_norm, clip_gradients
from plumbline.launcher.runtime.optim.optimizer import (
    CombinedOptimizer,
    divided,
    group_settings,
    make_optimizer,
    verify_settings,
)
from plumbline.launcher.runtime.optim.whole_matrices import WholeMatrixOptimizer
from plumbline.launcher.runtime.ranks.process_group import quiet_stdout
from plumbline.launcher.runtime.ranks.world import World
from plumbline.model.objectives.objective import Batch, TrainedLM
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.recomputation import recompute


def deepspeed_config(config: Config, rows: Sequence[ParameterRow], world: World) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run, with every key that matters.

    Args:
        config: the run.
        rows: its parameterization table.
        world: this process among all.
    """
    settings, data = config.deepspeed, config.data
    bf16 = settings.precision == "bf16"
    stays = (settings.zero_stage, settings.precision) == (1, "fp32") and not sends_gradients(config, world.size)
    sizes = buckets(config, totals(rows).trained, settings.zero_stage)
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "overlap_comm": settings.zero_stage > 1,  # at stage 1 DeepSpeed sums after the last backward pass
        "contiguous_gradients": not stays,  # copied into one buffer to be sent
        "reduce_scatter": True,
        "reduce_bucket_size": sizes.reduce,
        "allgather_bucket_size": sizes.gather,
        "stage3_prefetch_bucket_size": sizes.prefetch,
    }
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    return {
        "train_batch_size": data.global_batch_size,
        "train_micro_batch_size_per_gpu": data.micro_batch(world.size),
        "gradient_accumulation_steps": data.accumulation_steps(world.size),
        # At stage 0 DeepSpeed clips without returning the norm, so there the engine does both
        "gradient_clipping": config.optimizer.grad_clip if settings.zero_stage > 0 else 0.0,
        # Stage 0 keeps no master weights, so there bf16 means autocast over fp32 parameters
        "bf16": {
            "enabled": bf16 and settings.zero_stage > 0,
            "immediate_grad_update": True,
            "check_grad_overflow": not decides_on_device(config),  # a second check of what the norm already shows
        },
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": bf16 and settings.zero_stage == 0,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "data_types": {"grad_accum_dtype": "fp32"},  # the default is bf16, which costs 1 % of the gradient
        "communication_data_type": settings.communication_dtype,
        "prescale_gradients": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": not config.optimizer.kind.on_deepspeeds_list,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW updates offloaded states as well
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes around every micro-batch
    }


def decides_on_device(config: Config) -> bool:
    """Return whether the device decides by itself to skip an update, since all optimizer states are on it."""
    return config.optimizer.kind.skips_on_device and not config.deepspeed.offload_optimizer


def optimizer_groups(config: Config, plan: RunPlan, world: World) -> dict[str, dict[str, Any]]:
    """Return the optimizer's groups, divided where each is summed over ranks as soon as it is complete."""
    groups, stage = group_settings(plan.rows, config.optimizer, plan.settings.betas), config.deepspeed.zero_stage
    if world.size == 1 or not sums_shares(config, stage) or config.run.reproducible is not None:
        return groups
    counts = {row.name: row.count for row in plan.rows}
    return divided(groups, counts, buckets(config, totals(plan.rows).trained, stage).reduce)


class DeepSpeedEngine(Engine):
    """Train a model that DeepSpeed shards over the ranks, at any ZeRO stage.

    Args:
        config: the run.
        world: this process among all; the process group must be up.
        weights: by name, instead of those that the seed draws.
        restored: all weights will be restored from a checkpoint, and none is drawn.

    Raises:
        ConfigError: see `build_for_training`; or compiled blocks cannot read the tensors at the addresses that ZeRO
            has given them.
    """

    def __init__(
        self, config: Config, world: World, weights: Mapping[str, Tensor] | None = None, restored: bool = False
    ) -> None:
        plan = plan_run(config)
        self.stage = config.deepspeed.zero_stage
        self.settings = optimizer_groups(config, plan, world)
        self.requested = deepspeed_config(config, plan.rows, world)
        self._on_device = decides_on_device(config)
        recomputed = choose_recomputed(config, totals(plan.rows), world)
        model = self._build_model(config, plan, world, weights, restored)
        if compiles(config, world.device):
            deepspeed_fixes.restore_linear()
        recompute(blocks_of(model), recomputed)
        optimizer = make_optimizer(model, self.settings, sharded=self.stage > 0)
        self._engine = self._initialize(model, optimizer)
        super().__init__(config, plan, world, model)
        self._verify()
        self._adapt_deepspeed()
        for part in optimizer.parts.values() if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
            if isinstance(part, WholeMatrixOptimizer):
                part.attach(zero_shards.locate_matrices(part, self._engine.optimizer, self.stage, world), world)

    def _build_model(
        self, config: Config, plan: RunPlan, world: World, weights: Mapping[str, Tensor] | None, restored: bool
    ) -> TrainedLM:
        """Return the model on its device, already sharded at stage 3."""
        import deepspeed  # after process_group.join has chosen the accelerator
        from deepspeed.utils import set_z3_leaf_module

        if self.stage < 3:
            # Parameters are made on the device, so that the host holds only the tensors being drawn
            device = world.device
            return build_for_training(config, plan.rows, device, weights, device, restored=restored).to(device)
        construction = deepspeed.zero.Init(config_dict_or_path=self.requested)
        gather = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
        model = build_for_training(config, plan.rows, world.device, weights, construction, gather, restored)
        move_buffers(model, world.device)  # zero.Init moves only parameters, and DeepSpeed moves nothing later
        for block in blocks_of(model) if compiles(config, world.device) else []:
            set_z3_leaf_module(block, True)  # its hooks then run around it, not inside a compiled graph
        return model

    def _initialize(self, model: TrainedLM, optimizer: Optimizer) -> Any:
        """Return DeepSpeed's engine."""
        import deepspeed
        from deepspeed.runtime import torch_autocast

        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # else an earlier engine's setting stays
        with quiet_stdout(), deepspeed_fixes.no_memory_reports():
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=self.requested, dist_init_required=False
            )
        return engine

    def _adapt_deepspeed(self) -> None:
        """Replace how DeepSpeed sums gradients, and drop the messages of a rank that is alone."""
        settings, alone = self.config.deepspeed, self.world.size == 1
        if sums_shares(self.config, self.stage):
            GradientShares(self._engine, self.world.size)
        if (self.stage, settings.precision, settings.communication_dtype) == (2, "bf16", "fp32"):
            deepspeed_fixes.average_in_fp32(self._engine.optimizer, self.world.size)
        # DeepSpeed would copy all gradients into messages, sum them over one rank, and copy them back
        if self.stage == 0 and alone:
            self._engine.buffered_allreduce_fallback = self._sum_alone
        if alone and not self.requested["zero_optimization"]["contiguous_gradients"]:
            self._engine.optimizer.buffered_reduce_fallback = lambda *_, **__: None

    def _verify(self) -> None:
        """Check that DeepSpeed adopted its configuration, and that compiled blocks can read the tensors it laid out.

        Raises:
            RuntimeError: DeepSpeed did not adopt its configuration.
            ConfigError: compiled blocks cannot read the tensors at the addresses that ZeRO has given them.
        """
        engine, requested = self._engine, self.requested
        model_dtype, accumulation_dtype = engine.get_data_types()
        bf16 = requested["bf16"]["enabled"]
        summed_in = torch.bfloat16 if self.config.deepspeed.communication_dtype == "bf16" else torch.float32
        pairs = {
            "train_batch_size": (engine.train_batch_size(), requested["train_batch_size"]),
            "gradient_accumulation_steps": (
                engine.gradient_accumulation_steps(),
                requested["gradient_accumulation_steps"],
            ),
            "gradient_clipping": (engine.gradient_clipping(), requested["gradient_clipping"]),
            "zero stage": (engine.zero_optimization_stage(), requested["zero_optimization"]["stage"]),
            "parameter dtype": (model_dtype, torch.bfloat16 if bf16 else torch.float32),
            "gradient accumulation dtype": (accumulation_dtype, torch.float32),
            "communication dtype": (engine.communication_data_type, summed_in),
            "world size": (engine.dp_world_size, self.world.size),
        }
        wrong = [f"{name} is {found}, asked for {asked}" for name, (found, asked) in pairs.items() if found != asked]
        if wrong:
            raise RuntimeError(f"DeepSpeed did not adopt its configuration: {'; '.join(wrong)}")
        verify_settings(self.groups, self.settings)
        device = self.world.device
        if self.stage == 3 and self.world.size == 1 and device.type == "cuda" and compiles(self.config, device):
            zero_shards.refuse_uneven(self.model)

    def _expect_micro_batches(self, count: int) -> None:
        """Tell DeepSpeed how many micro-batches make a step, when that changes (data.batch_size_warmup)."""
        self._awaited = count
        if self.stage == 3:
            deepspeed_fixes.forget_gradients(self._engine.optimizer)
        if self.config.deepspeed.offload_optimizer:
            deepspeed_fixes.forget_offloaded_gradients(self._engine.optimizer, self.master_weights())
        if count == self._engine.gradient_accumulation_steps():
            return
        batch_size = count * self.config.data.micro_batch(self.world.size) * self.world.size
        self._engine.set_train_batch_size(batch_size)
        self.requested |= {"train_batch_size": batch_size, "gradient_accumulation_steps": count}
        self._verify()

    def _accumulate(self, batch: Batch, step: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        self._awaited -= 1
        last = self._awaited == 0
        # DeepSpeed counts micro-batches since the process started, which differs from our count when their number
        # changes (data.batch_size_warmup) after a resume
        self._engine.set_gradient_accumulation_boundary(last)
        with record_function("step: forward"):
            losses = self._call(TrainedLM.losses, batch, step)
        with record_function("step: backward"):
            self._engine.backward((losses.terms * weights).sum(), scale_wrt_gas=False)
        if not last:
            self._engine.step()  # only counts
        elif self.config.deepspeed.offload_optimizer:
            deepspeed_fixes.finish_offloaded_gradients(self._engine.optimizer)
        elif self.stage == 0:
            self._clipped_norm = clip_gradients(self.model, self.groups, self.config.optimizer)
        return losses.cross_entropy, losses.reports

    def _sum_alone(self, **_unused: Any) -> None:
        """Replace DeepSpeed's sum over ranks at stage 0 where there is one rank: only fill in missing gradients."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _update(self) -> tuple[Tensor, Tensor]:
        if self.stage == 0:
            return self._update_whole()
        limited = self._limit_base_norm() if self.config.optimizer.grad_clip_norm == "base" else None
        deciding: AbstractContextManager[object] = nullcontext()
        if self._on_device:
            deciding = deciding_on_device(self._engine.optimizer, self._optimizer)
        with deciding:
            self._engine.step()
        found = self._engine.get_global_grad_norm() if limited is None else limited
        norm = torch.as_tensor(found, dtype=torch.float64, device=self.world.device)
        if not self._on_device:
            return norm, torch.full_like(norm, self._engine.was_step_applied())
        skipped = self._optimizer.found_inf
        return torch.where(skipped > 0, torch.inf, norm), 1 - skipped

    def _update_whole(self) -> tuple[Tensor, Tensor]:
        """Update at stage 0, where DeepSpeed does not skip a gradient that is not finite."""
        norm = self._clipped_norm
        skipped = not_finite(norm)
        if self._on_device:
            self._optimizer.found_inf = skipped
        elif skipped:
            self._optimizer.zero_grad()  # without gradients no optimizer updates, and DeepSpeed still counts
        self._engine.step()
        return norm, 1 - skipped

    def _limit_base_norm(self) -> Tensor | None:
        """Make DeepSpeed, which limits the plain norm, clip by the base-equivalent norm, and return that.

        Returns None if it is not finite: DeepSpeed then skips the update by itself.
        """
        norms = zero_shards.gradient_norms(self._engine.optimizer, len(self.groups), self.stage)
        plain, base = torch.linalg.vector_norm(torch.stack(norms)), base_equivalent_norm(norms, self.groups)
        if not torch.isfinite(base):
            return None
        self._engine.optimizer.clip_grad = self.config.optimizer.grad_clip * float(plain / base) if base > 0 else 0.0
        return base

    def close(self) -> None:
        """Remove DeepSpeed's hooks on the parameters, by which they keep each other where no collector finds them."""
        self._engine.destroy()
        deepspeed_fixes.forget_modules(self._engine.module)

    def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        return self._engine(*arguments, through=method)  # type: ignore[no-any-return]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, as the running optimizer sees them."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def _optimizer(self) -> Any:
        """Return the optimizer that we made, which ZeRO wraps from stage 1 on."""
        optimizer = self._engine.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def master_weights(self) -> list[Tensor]:
        """Return this rank's flat shards; at stage 0 the parameters."""
        return zero_shards.master_weights(self._engine, self.groups)

    def refresh_weights(self) -> None:
        """Round and gather the master weights as DeepSpeed does after an update. Collective."""
        zero_shards.refresh_weights(self._engine)

    def pieces(self) -> list[Piece]:
        """Return this rank's part of every tensor."""
        return [
            zero_shards.locate(self._engine, name, parameter, self.groups, self.world)
            for name, parameter in self.model.named_parameters()
        ]

    def _is_whole(self, parameter: nn.Parameter) -> bool:
        return zero_shards.is_whole(parameter)

    @property
    def optimizer_state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Return the state of the optimizer by flat shard; at stage 0 by parameter."""
        state: MutableMapping[Tensor, dict[str, Any]] = self._optimizer.state
        return state

    def gradient(self, name: str) -> Tensor:
        """Return the whole gradient of a tensor; at stage 0 it is clipped. Collective."""
        return zero_shards.whole_gradient(self.model.get_parameter(name))
