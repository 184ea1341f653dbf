"""The training engine: DeepSpeed behind a small interface, with nothing left to DeepSpeed's defaults.

DeepSpeed accepts unknown keys in silence and its defaults move between releases. So its configuration is generated
here with every key that matters, what took effect is read back after `initialize`, and a mismatch refuses to train.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.updates import UpdateWatch
from plumbline.launcher.runtime.optim.moving_average import MovingAverage
from plumbline.launcher.runtime.optim.muon import ShardedMuon
from plumbline.launcher.runtime.optim.optimizer import (
    CombinedOptimizer,
    group_settings,
    make_optimizer,
    restore_settings,
    set_learning_rates,
    verify_settings,
)
from plumbline.launcher.runtime.run.scores import answer_sums
from plumbline.launcher.runtime.system.collectives import sum_over_ranks
from plumbline.launcher.runtime.system.startup import quiet_stdout
from plumbline.launcher.runtime.system.world import World
from plumbline.model.attention.block_sparse import permit_graphs
from plumbline.model.attention.pruned import set_alpha
from plumbline.model.blocks import KINDS
from plumbline.model.diagnostics.observer import observing
from plumbline.model.objectives import make_objective
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.objectives.objective import TrainedLM
from plumbline.model.parameterization.initialization import initialize
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.quantization import float8
from plumbline.model.quantization.layers import quantized_linears
from plumbline.model.quantization.precision import apply_precision
from plumbline.model.quantization.quantizer import Quantizer

Batch = Mapping[str, Any]  # of tensors: data.windows.Batch, or the same on a device

TAG = "deepspeed"  # sub-folder of a checkpoint with DeepSpeed's own files


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports; the same on every rank."""

    loss: Tensor
    """Mean cross-entropy over the valid tokens of the global batch: a scalar on the device, nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    applied: bool
    """False when DeepSpeed skipped the update because of a non-finite gradient."""
    reports: Tensor
    """[reports, 2]: sums and counts of what the objective reports beside the loss."""


def deepspeed_config(config: Config, world: World) -> dict[str, Any]:
    """DeepSpeed's configuration for this run."""
    settings, data = config.deepspeed, config.data
    bf16 = settings.precision == "bf16"
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": settings.bucket_size,
        "allgather_bucket_size": settings.bucket_size,
    }
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    return {
        "train_batch_size": data.global_batch_size,
        "train_micro_batch_size_per_gpu": data.micro_batch(world.size),
        "gradient_accumulation_steps": data.accumulation_steps(world.size),
        # At stage 0 DeepSpeed clips without telling the norm, so there train_step does both
        "gradient_clipping": config.optimizer.grad_clip if settings.zero_stage > 0 else 0.0,
        # Stage 0 keeps no master weights, so there bf16 means autocast over fp32 parameters
        "bf16": {
            "enabled": bf16 and settings.zero_stage > 0,
            "immediate_grad_update": True,
            "check_grad_overflow": True,
        },
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": bf16 and settings.zero_stage == 0,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "data_types": {"grad_accum_dtype": "fp32"},  # the default is bf16, which costs 1 % of the gradient
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": config.optimizer.name != "adamw",  # AdamW and Muon as one are not on its list
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW updates offloaded states as well
        "checkpoint": {"tag_validation": "Fail", "load_universal": False},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


class Engine:
    """A CausalLM with its objective and optimizer, sharded by DeepSpeed.

    Args:
        config: the run.
        world: this process among all; the process group must be up.
        weights: by name, instead of those that the seed draws.

    Raises:
        ConfigError: the device has no float8 and precision.float8 asks for it, or torchao is not installed.
    """

    def __init__(self, config: Config, world: World, weights: Mapping[str, Tensor] | None = None) -> None:
        import deepspeed  # after the accelerator is chosen in startup.start

        reason = float8.refusal(config.precision, world.device)
        if reason is not None:
            raise ConfigError(reason)
        self.config = config
        self.world = world
        rows = config.parameter_rows
        self.settings = group_settings(rows, config.optimizer, config.base_settings.betas)
        self.requested = requested = deepspeed_config(config, world)

        sharded = config.deepspeed.zero_stage == 3
        with deepspeed.zero.Init(config_dict_or_path=requested, enabled=sharded):
            forward = multipliers(config.model, config.parameterization)
            self.objective = make_objective(config.objective, config.model, forward, config.run.seed)
            model = TrainedLM(config.model, forward, self.objective)

        def gather(parameter: nn.Parameter) -> AbstractContextManager[object]:
            context: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)
            return context if sharded else nullcontext()

        initialize(model, rows, config.run.seed, gather)
        if weights is not None:
            parameters = dict(model.named_parameters())
            for name, weight in weights.items():
                with torch.no_grad(), gather(parameters[name]):
                    parameters[name].copy_(weight)
        apply_precision(model.model.layers, config.precision)
        float8.compute_in_float8(model.model.layers, config.precision)
        model.model.activation_checkpointing = config.train.activation_checkpointing
        if config.train.compile:
            permit_graphs()
            for block in (module for module in model.modules() if isinstance(module, tuple(KINDS.values()))):
                block.compile()
        if not sharded:
            model.to(world.device)
        optimizer = make_optimizer(model, self.settings, config.deepspeed.zero_stage)
        with quiet_stdout():
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=requested, dist_init_required=False
            )
        self._verify(requested)
        half_life = config.train.ema_half_life_tokens
        self.ema = None if half_life is None else MovingAverage(self._engine, self.groups, half_life)
        muon = optimizer.parts.get("muon") if isinstance(optimizer, CombinedOptimizer) else None
        if isinstance(muon, ShardedMuon):
            muon.attach(self._engine.optimizer, config.deepspeed.zero_stage, world)

    def _adopt_batch_size(self, accumulation: int) -> None:
        """Tell DeepSpeed how many micro-batches make a step, where that changes (data.batch_size_warmup)."""
        if accumulation == self._engine.gradient_accumulation_steps():
            return
        batch_size = accumulation * self.config.data.micro_batch(self.world.size) * self.world.size
        self._engine.set_train_batch_size(batch_size)
        self.requested |= {"train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        self._verify(self.requested)

    def _verify(self, requested: dict[str, Any]) -> None:
        """Compare what took effect in DeepSpeed with what was asked for."""
        engine = self._engine
        model_dtype, accumulation_dtype = engine.get_data_types()
        bf16 = requested["bf16"]["enabled"]
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
            "communication dtype": (engine.communication_data_type, torch.float32),
            "world size": (engine.dp_world_size, self.world.size),
        }
        wrong = [f"{name} is {found}, asked for {asked}" for name, (found, asked) in pairs.items() if found != asked]
        if wrong:
            raise RuntimeError(f"DeepSpeed did not adopt its configuration: {'; '.join(wrong)}")
        verify_settings(self.groups, self.settings)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, as the running optimizer sees them."""
        optimizer = self._engine.optimizer
        groups: list[dict[str, Any]] = getattr(optimizer, "optimizer", optimizer).param_groups
        return groups

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""
        return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in batch.items()}

    def train_step(
        self, micro_batches: Sequence[Batch], step: int, lr: float, watch: UpdateWatch | None = None
    ) -> StepResult:
        """One optimizer step: forward and backward over this rank's micro-batches, then the update.

        Args:
            micro_batches: all of this rank's in this step.
            step: completed steps so far; keys the random numbers of dropout, so nothing random needs saving.
            lr: base learning rate of this step.
            watch: looks at the gradients and at what the update does; it changes nothing.
        """
        self._engine.train()
        torch.manual_seed(hash((self.config.run.seed, step, self.world.rank)))
        set_learning_rates(self.groups, lr)
        if self.config.model.attention == "pruned":
            assert isinstance(self.config.objective, NextTokenConfig), "the configuration checks that"
            set_alpha(self._engine.module, self.config.objective.pruning_alpha(step))
        batches = [self.to_device(batch) for batch in micro_batches]
        # Each term of the loss is normalised by its targets in the whole global batch: an ignored label weighs nothing,
        # and accumulation or world size change nothing. DeepSpeed averages gradients over ranks, hence the world size.
        targets = sum_over_ranks(torch.stack([self.objective.targets(batch) for batch in batches]).sum(0).float())
        if step == 0:
            self._check_targets(targets)
        weights = self.world.size / targets.clamp_min(1)
        total = torch.zeros((), device=self.world.device)
        reports = torch.zeros(len(self.objective.reports), 2, device=self.world.device)
        self._adopt_batch_size(len(batches))
        for number, batch in enumerate(batches, start=1):
            # By itself DeepSpeed counts micro-batches since the process started, which is out of step with ours when
            # their number changes (data.batch_size_warmup) after a resume
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            losses, cross_entropy, found = self._engine(batch, step=step)
            self._engine.backward((losses * weights).sum(), scale_wrt_gas=False)
            if self.config.deepspeed.zero_stage == 0 and number == len(batches):
                grad_norm = clip_grad_norm_(
                    self._engine.module.parameters(), self.config.optimizer.grad_clip or math.inf
                )
            if watch is not None and number == len(batches):
                watch.before()
            self._engine.step()
            total += cross_entropy
            reports += found
        if watch is not None:
            watch.after()
        if self.config.deepspeed.zero_stage > 0:
            grad_norm = self._engine.get_global_grad_norm()
        applied = bool(self._engine.was_step_applied())
        if self.ema is not None and applied:
            self.ema.update(self.world.size * sum(batch["input_ids"].numel() for batch in batches))
        return StepResult(sum_over_ranks(total) / targets[0], float(grad_norm), applied, sum_over_ranks(reports))

    def _check_targets(self, targets: Tensor) -> None:
        """Refuse a term of the loss, beside the text's, that no token of a whole batch trains; `targets` [terms]."""
        for term, found in zip(self.objective.terms[1:], targets[1:].tolist(), strict=True):
            if not found:
                raise ConfigError(
                    f"objective.name = {self.config.objective.name}: no token of the first batch has a target for the "
                    f"loss of {term}: lower objective.horizon to the length of an answer or a document, or set another "
                    "objective.anchor_policy"
                )

    @torch.no_grad()
    def evaluate(self, batch: Batch, answers: bool = False, thinking: bool = False) -> Tensor:
        """Summed cross-entropy (nats) and number of valid tokens of this rank's batch: [2], fp32.

        With `answers`, the sums of `answer_sums` instead: [5], from logits [B, T, vocab_size] that are held at once;
        with `thinking`, by the predictions of an objective that thinks.
        """
        self._engine.eval()
        batch = self.to_device(batch)
        context = {name: batch[name] for name in ("document_ids", "positions")}
        run = partial(self._engine, batch["input_ids"], **context)
        if thinking:
            run = partial(self._engine, batch, thinking=True)
        if answers:
            return answer_sums(run(), batch["labels"])
        _, cross_entropy = run(labels=batch["labels"])
        return torch.stack((cross_entropy, (batch["labels"] >= 0).sum().float()))

    @torch.no_grad()
    def watch(self, batch: Batch, attention_stride: int) -> UpdateWatch:
        """Observe a forward of this rank's batch; the watch is for the step that follows. All ranks must call."""
        self._engine.eval()
        batch = self.to_device(batch)
        with observing(self._engine.module, attention_stride) as observation:
            self._engine(batch["input_ids"], document_ids=batch["document_ids"], positions=batch["positions"])
        return UpdateWatch(self._engine, observation, self.world)

    def quantized(self, bits: int) -> AbstractContextManager[None]:
        """The blocks' matrix products with weights and inputs rounded to so many bits, meanwhile."""
        per_tensor = Quantizer(format=f"int{bits}")
        return quantized_linears(self._engine.module.model.layers, per_tensor, per_tensor)

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full fp32 weight of every parameter, one at a time on the CPU; all ranks must iterate together."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self._engine.module.named_parameters():
            weight = safe_get_full_fp32_param(parameter)
            yield name, (parameter.data if weight is None else weight).detach().float().cpu()

    def save(self, folder: Path) -> None:
        """Write this rank's shards into folder/deepspeed and folder/ema; all ranks must call.

        Raises:
            OSError, RuntimeError: this rank could not write; the other ranks return all the same.
        """
        problems: list[Exception] = []
        with _writes_deferring_errors(self._engine, problems):
            # universal_checkpoint_info lets DeepSpeed's converter read the files, for a resume on another world size
            state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
            self._engine.save_checkpoint(str(folder), tag=TAG, client_state=state, save_latest=False)
        if problems:
            raise problems[0]
        if self.ema is not None:
            self.ema.save(folder, self.world.rank)

    def load(self, folder: Path) -> None:
        """Read this rank's shards that `save` wrote; the configuration's hyperparameters win over the saved ones.

        Raises:
            RuntimeError: DeepSpeed found nothing to load (it would go on from scratch without a word).
        """
        loaded, _ = self._engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        if loaded is None:
            raise RuntimeError(f"{folder / TAG}: DeepSpeed loaded nothing")
        restore_settings(self.groups, self.settings)
        if self.ema is not None:
            self.ema.load(folder, self.world.rank)


@contextmanager
def _writes_deferring_errors(engine: Any, problems: list[Exception]) -> Iterator[None]:
    """Collect what goes wrong while DeepSpeed writes files, instead of raising it there and then.

    DeepSpeed's save ends in a barrier: a rank that left it early would keep the others waiting until they time out.
    """

    def deferring(write: Callable[..., Any]) -> Callable[..., None]:
        def attempt(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except (OSError, RuntimeError) as problem:  # torch.save reports a full disk as RuntimeError
                problems.append(problem)

        return attempt

    writer, copy_script = engine.checkpoint_engine, engine._copy_recovery_script
    save = writer.save
    writer.save, engine._copy_recovery_script = deferring(save), deferring(copy_script)
    try:
        yield
    finally:
        writer.save, engine._copy_recovery_script = save, copy_script
