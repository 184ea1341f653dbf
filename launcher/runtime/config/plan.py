"""Derive a run's steps, tokens, learning rates and tensors from its configuration, once, before any work starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from plumbline.data.batch_plan import BatchPlan
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.horizon import scale_settings
from plumbline.launcher.runtime.optim.proportions import Proportions
from plumbline.launcher.runtime.optim.schedule import Schedule
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.skeleton import parameter_count
from plumbline.model.parameterization.table import parameter_table
from plumbline.model.quantization.precision import check_precision


@dataclass(frozen=True)
class RunPlan:
    """Hold the plan of a run, which is a pure function of its configuration."""

    batch_plan: BatchPlan
    """Which samples and tokens each step takes."""
    first_step: int
    """Step that the run starts from: 0, or where a branch leaves its parent."""
    total_steps: int
    """Optimizer steps of the whole run, including a branch's parent."""
    total_tokens: int
    """Training tokens of these steps."""
    settings: OptimizerSettings
    """The optimizer's values, scaled to this batch size and horizon, before the parameterization scales them."""
    schedule: Schedule
    """The factor on every learning rate, as a function of tokens."""
    proportions: Proportions
    """The planned length relative to model size, batch, weight decay and warm-up; for a branch, those of its parent."""
    rows: tuple[ParameterRow, ...]
    """The parameterization's table of this run, including the tensors of its objective."""

    def lr_after(self, tokens: int) -> float:
        """Return the base learning rate of the update after `tokens` tokens of training."""
        return self.settings.lr * self.schedule.factor(tokens)


def plan_run(config: Config) -> RunPlan:
    """Derive the plan of a run, with the checks that need the shapes of its tensors.

    A branch keeps its parent's horizon, and thus its learning rate.

    Raises:
        ConfigError: names every setting that does not fit the model, the batch or the length of the run.
    """
    batch_plan, branch = config.data.batch_plan, config.schedule.branch
    planned_steps, total_steps = config.train.length.end_step(batch_plan), last_step(config)
    settings, rows = plan_parameters(config)
    return RunPlan(
        batch_plan=batch_plan,
        first_step=0 if branch is None else branch.first_step,
        total_steps=total_steps,
        total_tokens=batch_plan.tokens_before(total_steps),
        settings=settings,
        schedule=Schedule(config.schedule, batch_plan, total_steps),
        proportions=_proportions(config, settings, batch_plan, planned_steps),
        rows=tuple(rows),
    )


def plan_parameters(config: Config) -> tuple[OptimizerSettings, list[ParameterRow]]:
    """Return the optimizer's settings and the table of all tensors, also for a branch that is not resolved yet.

    Raises:
        ConfigError: as in `plan_run`.
    """
    batch_plan = config.data.batch_plan
    planned_steps = config.train.length.end_step(batch_plan)
    problems: list[str] = []
    with _collected(problems):
        check_precision(config.precision, config.model)
    with _collected(problems):
        planned_tokens = batch_plan.tokens_before(planned_steps)
        settings = scale_settings(
            config.optimizer, config.horizon, config.model, batch_plan.tokens_per_step, planned_steps, planned_tokens
        )
        rows = parameter_table(config.model, config.parameterization, settings, config.objective)
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in the configuration", *problems]))
    return settings, rows


def last_step(config: Config) -> int:
    """Return the step that a run ends with; a branch ends with its cooldown."""
    batch_plan, branch = config.data.batch_plan, config.schedule.branch
    return config.train.length.end_step(batch_plan) if branch is None else branch.last_step(batch_plan)


def _proportions(config: Config, settings: OptimizerSettings, batch_plan: BatchPlan, steps: int) -> Proportions:
    tokens = batch_plan.tokens_before(steps)
    decayed = settings.lr * settings.weight_decay * steps
    return Proportions(
        tokens=tokens,
        batch_tokens=batch_plan.tokens_per_step,
        tokens_per_parameter=tokens / parameter_count(config.model),
        tau=1 / decayed if decayed > 0 else None,
        warmup_share=batch_plan.steps_for(config.schedule.warmup.from_start(batch_plan, tokens)) / steps,
    )


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Collect the message of a ValueError instead of raising it, so that all problems are reported at once."""
    try:
        yield
    except ValueError as error:
        problems.append(str(error))
