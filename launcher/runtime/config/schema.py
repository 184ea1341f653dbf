"""The configuration of a run: one typed, nested, strict schema, loaded from YAML plus `section.key=value` overrides.

Each section is declared next to the code it configures; this module joins them, adds the sections that belong to the
run itself, and turns whatever is wrong with a file into one readable error before any work starts.
"""

from typing import Any

from pydantic import BaseModel, Field, field_validator
from pydantic import model_validator as validator

from plumbline.data.config import DataConfig
from plumbline.launcher.runtime.config.sections import (
    CheckpointConfig,
    DeepSpeedConfig,
    MetricsConfig,
    RunConfig,
    TrainConfig,
)
from plumbline.launcher.runtime.optim.horizon import HorizonConfig, scale_settings
from plumbline.launcher.runtime.optim.optimizer import ZERO_STAGES, OptimizerConfig
from plumbline.launcher.runtime.optim.schedule import Schedule, ScheduleConfig
from plumbline.model.attention.block_sparse import refusal
from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.objectives.silent_thoughts import SilentThoughtsConfig
from plumbline.model.parameterization.config import OptimizerSettings, ParameterizationConfig
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table
from plumbline.model.quantization.precision import PrecisionConfig, check_precision


class Config(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Everything about a run. Saved, complete, with the run and with each checkpoint."""

    run: RunConfig
    model: ModelConfig
    parameterization: ParameterizationConfig
    precision: PrecisionConfig = PrecisionConfig()
    objective: ObjectiveConfig = Field(default=NextTokenConfig(), discriminator="name")
    data: DataConfig
    optimizer: OptimizerConfig
    horizon: HorizonConfig = HorizonConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @field_validator("objective", mode="before")
    @classmethod
    def _name_objective(cls, objective: Any) -> Any:
        return {"name": "next_token", **objective} if isinstance(objective, dict) else objective

    @validator(mode="after")
    def _check_lengths(self) -> "Config":
        if self.data.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"data.sequence_length = {self.data.sequence_length} exceeds "
                f"model.max_position_embeddings = {self.model.max_position_embeddings}: raise it or shorten sequences"
            )
        _ = self.parameter_rows  # refuses what does not fit together
        return self

    @validator(mode="after")
    def _check_precision(self) -> "Config":
        check_precision(self.precision, self.model)
        if self.precision.float8 and self.deepspeed.precision == "bf16" and self.deepspeed.zero_stage == 0:
            raise ValueError(
                f"precision.float8 = {self.precision.float8}: deepspeed.zero_stage = 0 computes in bf16 by autocast, "
                "which float8 layers do not follow on every device: set deepspeed.zero_stage=1"
            )
        return self

    @validator(mode="after")
    def _check_half_life(self) -> "Config":
        half_life = self.train.ema_half_life_tokens
        if half_life is not None and half_life < self.tokens_per_step:
            raise ValueError(
                f"train.ema_half_life_tokens = {half_life} is less than one step of {self.tokens_per_step} tokens: "
                "it is in tokens; a hundredth of the whole run is a start"
            )
        return self

    @validator(mode="after")
    def _check_looking_ahead(self) -> "Config":
        objective, length = self.objective, self.data.sequence_length
        for key in ("horizon", "anchors"):
            found = getattr(objective, key, None)
            if found is not None and found > length:
                raise ValueError(
                    f"objective.{key} = {found} is more than data.sequence_length = {length} has room for: set "
                    f"{length} or less"
                )
        if not isinstance(objective, LatentLookaheadConfig | SilentThoughtsConfig):
            return self
        texts = [number for number, source in enumerate(self.data.train) if source.task is None]
        if texts and objective.anchor_policy in ("response_start", "sequential"):
            raise ValueError(
                f"objective.anchor_policy = {objective.anchor_policy} begins where labels begin, and in a text "
                f"(data.train.{texts[0]}) that is its first token: set stratified or random"
            )
        if isinstance(objective, LatentLookaheadConfig) and objective.masks == "blocks":
            reason = refusal(self.model)
            if reason is not None:
                raise ValueError(f"objective.masks = blocks: the kernel does not serve this model: {reason}; set dense")
        return self

    @validator(mode="after")
    def _check_objective(self) -> "Config":
        if not isinstance(self.objective, NextTokenConfig):
            if self.model.attention != "softmax":
                raise ValueError(
                    f"objective.name = {self.objective.name} needs model.attention: softmax; it is "
                    f"{self.model.attention}, so train for next_token"
                )
        elif self.objective.pruning_weight and self.model.attention != "pruned":
            raise ValueError(
                f"objective.pruning_weight = {self.objective.pruning_weight} prices the context that model.attention: "
                f"pruned keeps, and it is {self.model.attention}: set it to 0"
            )
        return self

    @validator(mode="after")
    def _check_optimizer(self) -> "Config":
        name, stage = self.optimizer.name, self.deepspeed.zero_stage
        if stage not in ZERO_STAGES[name]:
            known = ", ".join(str(stage) for stage in ZERO_STAGES[name])
            raise ValueError(
                f"deepspeed.zero_stage = {stage}: optimizer.name = {name} needs whole matrices and works at stage "
                f"{known}: set deepspeed.zero_stage={known}, or another optimizer.name"
            )
        if name == "muon" and self.deepspeed.offload_optimizer:
            raise ValueError(
                "deepspeed.offload_optimizer = true: optimizer.name = muon orthogonalises on the device: turn it off"
            )
        return self

    @property
    def parameter_rows(self) -> list[ParameterRow]:
        """The parameterization's table of this run, its objective's tensors included."""
        return parameter_table(self.model, self.parameterization, self.base_settings, self.objective)

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step, over all ranks, after the batch-size warm-up."""
        return self.data.global_batch_size * self.data.sequence_length

    @property
    def first_step(self) -> int:
        """Step that the run starts from: 0, or where a branch leaves its parent."""
        return 0 if self.schedule.branch is None else self.schedule.branch.first_step

    @property
    def total_tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.data.batch_plan.tokens_before(self.total_steps)

    @property
    def learning_rate(self) -> Schedule:
        """The schedule of this run, as a function of tokens."""
        return Schedule(self.schedule, self.data.batch_plan, self.total_steps)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, a branch's parent included."""
        if self.schedule.branch is not None:
            return self.schedule.branch.last_step(self.data.batch_plan)
        return self.planned_steps

    @property
    def planned_steps(self) -> int:
        """Steps that train.steps or train.tokens ask for: of a branch, its parent's."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None, "TrainConfig checks that one of the two is given"
        return self.data.batch_plan.steps_for(self.train.tokens)

    @property
    def base_settings(self) -> OptimizerSettings:
        """What the parameterization scales: the optimizer's values, carried over to this batch size and horizon.

        A branch keeps its parent's horizon, and with it the learning rate that the parent had.
        """
        steps = self.planned_steps
        tokens = self.data.batch_plan.tokens_before(steps)
        return scale_settings(self.optimizer, self.horizon, self.model, self.tokens_per_step, steps, tokens)
