"""Join the sections of a run's configuration into one typed, nested, strict schema.

Each section is declared next to the code it configures. This module joins them and checks values across sections; what
is derived from the values is checked in plan.py.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, field_validator
from pydantic import model_validator as validator

from plumbline.data.config import DataConfig
from plumbline.launcher.runtime.config.guards import GuardsConfig
from plumbline.launcher.runtime.config.sections import (
    CheckpointConfig,
    DeepSpeedConfig,
    MetricsConfig,
    RunConfig,
    TrainConfig,
)
from plumbline.launcher.runtime.optim.horizon import HorizonConfig
from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig
from plumbline.launcher.runtime.optim.schedule import ScheduleConfig
from plumbline.model.combinations import check_model
from plumbline.model.config import ModelConfig
from plumbline.model.objectives import ObjectiveConfig
from plumbline.model.objectives.next_token import NextTokenConfig
from plumbline.model.parameterization.config import ParameterizationConfig
from plumbline.model.quantization.precision import PrecisionConfig

EXACT_COUNTS = 2**24
"""Largest count up to which fp32, which counts the labels of a step, is exact."""


class Config(BaseModel, extra="forbid", frozen=True, strict=True):
    """Hold the whole configuration of a run, which is saved with the run and with each checkpoint."""

    # "shapes" is what a change of the section affects, unless one of its fields overrides it: see identity.py
    run: RunConfig = Field(json_schema_extra={"shapes": "nothing"})
    model: Annotated[ModelConfig, AfterValidator(check_model)] = Field(json_schema_extra={"shapes": "model"})
    parameterization: ParameterizationConfig = Field(json_schema_extra={"shapes": "model"})
    precision: PrecisionConfig = Field(default=PrecisionConfig(), json_schema_extra={"shapes": "model"})
    objective: ObjectiveConfig = Field(
        default=NextTokenConfig(), discriminator="name", json_schema_extra={"shapes": "run"}
    )
    data: DataConfig = Field(json_schema_extra={"shapes": "run"})
    optimizer: OptimizerConfig = Field(json_schema_extra={"shapes": "course"})
    horizon: HorizonConfig = Field(default=HorizonConfig(), json_schema_extra={"shapes": "course"})
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), json_schema_extra={"shapes": "course"})
    train: TrainConfig = Field(json_schema_extra={"shapes": "course"})
    deepspeed: DeepSpeedConfig = Field(default=DeepSpeedConfig(), json_schema_extra={"shapes": "course"})
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), json_schema_extra={"shapes": "nothing"})
    guards: GuardsConfig = Field(default=GuardsConfig(), json_schema_extra={"shapes": "course"})
    metrics: MetricsConfig = Field(default=MetricsConfig(), json_schema_extra={"shapes": "nothing"})

    @field_validator("objective", mode="before")
    @classmethod
    def _name_objective(cls, objective: Any) -> Any:
        return {"name": NextTokenConfig().name, **objective} if isinstance(objective, dict) else objective

    @validator(mode="before")
    @classmethod
    def _fill_in_context(cls, values: Any) -> Any:
        """Fill in the model's keys that depend on the data, if its section omits them.

        Its context is as long as the sequences, and documents packed by best fit do not see each other.
        """
        if not isinstance(values, dict):
            return values
        model, data = values.get("model"), values.get("data")
        if not isinstance(model, dict) or not isinstance(data, dict):
            return values
        filled = {}
        length = data.get("sequence_length")
        if model.get("max_position_embeddings") is None and isinstance(length, int) and length > 0:
            filled["max_position_embeddings"] = length
        if "document_mask" not in model and data.get("packing") == "best_fit":
            filled["document_mask"] = True
        return {**values, "model": {**model, **filled}} if filled else values

    @validator(mode="after")
    def _check(self) -> "Config":
        problems = [
            *self._length_problems(),
            *self._precision_problems(),
            *self._compile_problems(),
            *self._objective_problems(),
            *self._optimizer_problems(),
            *self._reproducible_problems(),
            *self.guards.problems(self.checkpoint),
            *self._replay_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _length_problems(self) -> Iterator[str]:
        if self.data.sequence_length > self.model.max_position_embeddings:
            yield (
                f"data.sequence_length = {self.data.sequence_length} exceeds "
                f"model.max_position_embeddings = {self.model.max_position_embeddings}: raise it or shorten sequences"
            )
        half_life, tokens = self.train.ema_half_life_tokens, self.data.batch_plan.tokens_per_step
        if half_life is not None and half_life < tokens:
            yield (
                f"train.ema_half_life_tokens = {half_life} is less than one step of {tokens} tokens: "
                "it is in tokens; a hundredth of the whole run is a start"
            )

    def _precision_problems(self) -> Iterator[str]:
        if self.precision.float8 and self.deepspeed.precision == "bf16" and self.deepspeed.zero_stage == 0:
            yield (
                f"precision.float8 = {self.precision.float8}: deepspeed.zero_stage = 0 computes in bf16 by autocast, "
                "which float8 layers do not follow on every device: set deepspeed.zero_stage=1"
            )

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """Return the ZeRO stages that support the optimizer; for `any_ranks` not 3, which holds no whole gradient."""
        return tuple(stage for stage in self.optimizer.kind.zero_stages if stage < 3 or self.run.reproducible is None)

    @property
    def why_not_compiled(self) -> str | None:
        """Return why blocks cannot be compiled, and the remedy, or None if they can.

        ZeRO-3 gathers a compiled block as a whole, and reduces its gradients when that of its input is ready. If the
        block ran twice it would reduce again, and a gradient from elsewhere would come too late. Hooks within the
        block, which handle both, would break it into pieces that are recompiled again and again.
        """
        if self.train.activation_checkpointing == "selective":
            return (
                "train.activation_checkpointing = selective keeps results of single operators, which compiled code "
                "does not show: leave train.compile out, or set train.activation_checkpointing=2"
            )
        if self.deepspeed.zero_stage < 3:
            return None
        why = None
        if self.objective.reuses_blocks:
            why = f"objective.name = {self.objective.name} runs blocks more than once in a step"
        elif self.model.value_residual:
            why = "model.value_residual reads the first block's values from outside"
        if why is None:
            return None
        return (
            f"at deepspeed.zero_stage = 3 a block is compiled as one, and {why}: leave train.compile out, or set "
            "deepspeed.zero_stage=2"
        )

    def _compile_problems(self) -> Iterator[str]:
        if self.train.compile and self.why_not_compiled is not None:
            yield f"train.compile = true: {self.why_not_compiled}"

    def _objective_problems(self) -> Iterator[str]:
        texts = [f"data.train.{number}" for number, source in enumerate(self.data.train) if source.task is None]
        yield from self.objective.problems(self.model, self.data.sequence_length, texts[0] if texts else None)

    def _optimizer_problems(self) -> Iterator[str]:
        kind, stage = self.optimizer.kind, self.deepspeed.zero_stage
        if stage not in kind.zero_stages:
            known = ", ".join(str(stage) for stage in kind.zero_stages)
            yield (
                f"deepspeed.zero_stage = {stage}: optimizer.name = {kind.name} needs whole matrices and works at stage "
                f"{known}: set deepspeed.zero_stage={known}, or another optimizer.name"
            )
        if kind.offload_refusal is not None and self.deepspeed.offload_optimizer:
            yield (
                f"deepspeed.offload_optimizer = true: optimizer.name = {kind.name} {kind.offload_refusal}: turn it off"
            )

    def _reproducible_problems(self) -> Iterator[str]:
        if self.run.reproducible is None:
            return
        asked, data = f"run.reproducible = {self.run.reproducible}", self.data
        if self.deepspeed.zero_stage == 3:
            yield (
                f"{asked}: deepspeed.zero_stage = 3 holds no whole gradient, whose sum is to have one order: set "
                "deepspeed.zero_stage=2"
            )
        if self.deepspeed.offload_optimizer:
            yield f"{asked}: deepspeed.offload_optimizer = true is not served: turn it off"
        if self.deepspeed.communication_dtype != "fp32":
            yield (
                f"{asked} sums in fp32: deepspeed.communication_dtype = {self.deepspeed.communication_dtype} would not "
                "be heeded; leave it out"
            )
        if data.batch_plan.tokens_per_step >= EXACT_COUNTS:
            yield (
                f"{asked}: a step has {data.batch_plan.tokens_per_step} tokens, and their labels are counted exactly "
                f"below {EXACT_COUNTS}: lower data.global_batch_size"
            )

    def _replay_problems(self) -> Iterator[str]:
        if self.guards.replay_interval is None:
            return
        asked = f"guards.replay_interval = {self.guards.replay_interval}"
        if not self.run.repeats:
            yield f"{asked} compares bits, which kernels need not repeat by themselves: set run.deterministic=true"
        if self.deepspeed.zero_stage == 3:
            yield (
                f"{asked} needs all weights on every rank, and deepspeed.zero_stage = 3 divides them: set "
                "deepspeed.zero_stage=2, or leave guards.replay_interval out"
            )
