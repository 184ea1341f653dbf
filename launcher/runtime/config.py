"""The configuration of a run: one typed, nested, strict schema, loaded from YAML plus `section.key=value` overrides.

Each section is declared next to the code it configures; this module joins them, adds the sections that belong to the
run itself, and turns whatever is wrong with a file into one readable error before any work starts.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic import model_validator as validator
from yaml import YAMLError

from data.config import DataConfig, SourceConfig
from launcher.runtime.horizon import HorizonConfig, scale_settings
from launcher.runtime.initial_weights import section_of
from launcher.runtime.optimizer import ZERO_STAGES, OptimizerConfig
from launcher.runtime.schedule import Schedule, ScheduleConfig
from launcher.runtime.sections import CheckpointConfig, DeepSpeedConfig, MetricsConfig, RunConfig, TrainConfig
from model.attention.block_sparse import refusal
from model.config import ModelConfig
from model.objectives import ObjectiveConfig
from model.objectives.latent_lookahead import LatentLookaheadConfig
from model.objectives.next_token import NextTokenConfig
from model.objectives.silent_thoughts import SilentThoughtsConfig
from model.parameterization import OptimizerSettings, ParameterizationConfig, ParameterRow, parameter_table
from model.quantization.precision import PrecisionConfig, check_precision


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists every problem, one per line."""


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


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read a YAML file, apply its `extends:` chain and the overrides, fill in what the corpus decides, validate.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, applied in order; values are parsed as YAML.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown keys, wrong types or values; one line for each problem.
    """
    try:
        merged = OmegaConf.merge(_read(path), _parse_overrides(overrides))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, expected sections of keys")
    _fill_from_model(values)
    _fill_from_data(values)
    return parse_config(values, source=str(path))


def parse_config(values: Any, source: str) -> Config:
    """Validate nested plain values; raise ConfigError naming every problem, with `source` in front."""
    refuse_non_finite(values, source)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [f"  {line}" for line in explain(error, Config)]
        raise ConfigError("\n".join([f"{source}: {len(lines)} problem(s) in the configuration", *lines])) from error


def refuse_non_finite(values: Any, source: str) -> None:
    """Raise ConfigError where a float in nested plain values is nan or inf, naming each, with `source` in front.

    This comes before the schema is asked, because its own checks compute with the numbers.
    """
    lines = [f"  {path} = {value}: a finite number is expected" for path, value in _non_finite(values)]
    if lines:
        raise ConfigError("\n".join([f"{source}: {len(lines)} problem(s) in the configuration", *lines]))


def _non_finite(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield path and value of each float that is nan or inf."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _non_finite(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back to an equal object."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_escape(config.model_dump()))), encoding="utf-8")


def differences(old: BaseModel, new: BaseModel) -> list[str]:
    """`path: old -> new` for each leaf in which two configurations differ."""
    before, after = dict(_leaves(old.model_dump())), dict(_leaves(new.model_dump()))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        f"{path}: {before.get(path)!r} -> {after.get(path)!r}" for path in paths if before.get(path) != after.get(path)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _escape(value: Any) -> Any:
    """The same values with every `${` of a string written so that OmegaConf reads it back as it is."""
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(path: Path, extended_by: tuple[Path, ...] = ()) -> DictConfig:
    """One YAML file merged over the file it extends (a path relative to it)."""
    if path.resolve() in extended_by:
        raise ConfigError(f"{path}: extends itself, by way of {' -> '.join(str(step) for step in extended_by)}")
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError as error:
        known = sorted(str(p) for p in path.parent.glob("*.yaml"))
        raise ConfigError(
            f"{path}: no such file; {path.parent} holds {', '.join(known) or 'no .yaml files'}"
        ) from error
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: expected sections of keys")
    base = config.pop("extends", None)
    if base is None:
        return config
    merged = OmegaConf.merge(_read(path.parent / str(base), (*extended_by, path.resolve())), config)
    assert isinstance(merged, DictConfig)
    return merged


def _parse_overrides(overrides: list[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"{override!r}: an override is section.key=value, for example optimizer.lr=0.003")
    try:
        return OmegaConf.from_dotlist(overrides)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error


def _fill_from_model(values: dict[Any, Any]) -> None:
    """Take a model section without a shape from the model that training starts from (train.initialize_from)."""
    model, train = values.get("model") or {}, values.get("train")
    spec = train.get("initialize_from") if isinstance(train, dict) else None
    if isinstance(spec, str) and isinstance(model, dict) and "hidden_size" not in model:
        values["model"] = {**section_of(spec), **model}


def _fill_from_data(values: dict[Any, Any]) -> None:
    """Take model.vocab_size from the first source and model.max_position_embeddings from the sequence length."""
    model, data = values.get("model"), values.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return
    if model.get("max_position_embeddings") is None and "sequence_length" in data:
        model["max_position_embeddings"] = data["sequence_length"]
    if model.get("vocab_size") is None:
        model["vocab_size"] = _vocab_size(data)


def _vocab_size(data: dict[Any, Any]) -> Any:
    """Of the first corpus or task."""
    sources = data.get("train")
    first = sources[0] if isinstance(sources, list) and sources else {}
    if isinstance(first, dict) and first.get("task") is not None:
        try:
            task = SourceConfig.model_validate(first).task
        except ValidationError:
            return 1  # validation of the whole will say what is wrong with the task
        assert task is not None, "it was given"
        return task.vocab_size
    corpus = None
    try:
        corpus = Path(first["path"])
        return json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))["vocab_size"]
    except (KeyError, TypeError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.vocab_size: not given, and data.train[0].path = {corpus} holds no readable corpus.json to take "
            "it from: prepare the corpus first (launcher/prepare.py) or set model.vocab_size"
        ) from error


def explain(error: ValidationError, schema: type[BaseModel]) -> Iterator[str]:
    """One line for each problem pydantic found in values for `schema`: path, offending value, remedy."""
    for problem in error.errors():
        typed, _ = _follow(schema, problem["loc"])
        path = ".".join(typed)
        if problem["type"] == "extra_forbidden":
            _, section = _follow(schema, problem["loc"][:-1])
            known = list(section.model_fields) if section is not None else []
            close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
            yield f"{path} = {problem['input']!r}: unknown key; {hint}"
        elif problem["type"] == "missing":
            yield f"{path}: missing, and it has no default"
        elif problem["type"] == "value_error":  # of the whole configuration, it names the keys itself
            yield f"{path}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
        elif problem["type"] == "union_tag_invalid":
            tag, known = problem["ctx"]["tag"], re.findall(r"'(\w+)'", problem["ctx"]["expected_tags"])
            close = difflib.get_close_matches(tag, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(known)}"
            yield f"{path}.name = {tag}: there is none of that name; {hint}"
        elif problem["type"] in ("union_tag_not_found", "model_attributes_type"):
            yield f"{path} = {problem['input']!r}: a section of keys is expected, its name among them: {path}.name=..."
        else:
            yield f"{path} = {problem['input']!r}: {problem['msg']}"


def _follow(schema: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """A place in values for `schema` as one types it, and the schema of the section that is there, if one is.

    Where a section's `name` chooses among several schemas, pydantic puts that name into the location.
    """
    typed: list[str] = []
    schemas = [schema]
    for part in location:
        chosen = [choice for choice in schemas if len(schemas) > 1 and part in _names(choice)]
        if chosen:
            schemas = chosen
            continue
        typed.append(str(part))
        if isinstance(part, str):
            field = schemas[0].model_fields.get(part) if schemas else None
            choices = () if field is None else getattr(field.annotation, "__args__", (field.annotation,))
            schemas = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
    return typed, schemas[0] if schemas else None


def _names(schema: type[BaseModel]) -> tuple[str, ...]:
    """What `name` may be in this section, if it chooses."""
    return get_args(schema.model_fields["name"].annotation) if "name" in schema.model_fields else ()
