"""Derive what a run will do from its configuration, once, before any work starts: steps, tokens, rates, tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plumbline.data.batch_plan import BatchPlan
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.horizon import scale_settings
from plumbline.launcher.runtime.optim.schedule import Schedule
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.table import parameter_table
from plumbline.model.quantization.precision import check_precision


@dataclass(frozen=True)
class RunPlan:
    """Hold what a run will do; a pure function of its configuration."""

    batches: BatchPlan
    """Which samples and tokens each step takes."""
    first_step: int
    """Step that the run starts from: 0, or where a branch leaves its parent."""
    total_steps: int
    """Optimizer steps of the whole run, a branch's parent included."""
    total_tokens: int
    """Training tokens of these steps."""
    settings: OptimizerSettings
    """What the parameterization scales: the optimizer's values, carried over to this batch size and horizon."""
    schedule: Schedule
    """The factor on every learning rate, as a function of tokens."""
    rows: tuple[ParameterRow, ...]
    """The parameterization's table of this run, the tensors of its objective included."""

    def lr_after(self, tokens: int) -> float:
        """Return the base learning rate of the update that is made after `tokens` tokens of training."""
        return self.settings.lr * self.schedule.factor(tokens)


def plan_run(config: Config) -> RunPlan:
    """Derive the plan of a run, and check what only the shapes of its tensors tell.

    A branch keeps its parent's horizon, and with it the learning rate that the parent had.

    Raises:
        ConfigError: names every setting that does not fit the model, the batch or the length of the run.
    """
    batches, branch = config.data.batch_plan, config.schedule.branch
    planned_steps = config.train.length.end_step(batches)
    total_steps = planned_steps if branch is None else branch.last_step(batches)
    problems: list[str] = []
    with _collected(problems):
        check_precision(config.precision, config.model)
    with _collected(problems):
        planned_tokens = batches.tokens_before(planned_steps)
        settings = scale_settings(
            config.optimizer, config.horizon, config.model, batches.tokens_per_step, planned_steps, planned_tokens
        )
        rows = parameter_table(config.model, config.parameterization, settings, config.objective)
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s) in the configuration", *problems]))
    return RunPlan(
        batches=batches,
        first_step=0 if branch is None else branch.first_step,
        total_steps=total_steps,
        total_tokens=batches.tokens_before(total_steps),
        settings=settings,
        schedule=Schedule(config.schedule, batches, total_steps),
        rows=tuple(rows),
    )


def describe_settings(config: Config, plan: RunPlan) -> str:
    """Say which values the optimizer has at the base size, and which were given where the horizon changed them."""
    used, given = plan.settings, config.optimizer
    values = f"lr {used.lr:g}, weight decay {used.weight_decay:g}, eps {used.eps:g}, betas {_pair(used.betas)}"
    if config.horizon.is_plain:
        return values
    tau = "" if config.horizon.tau is None else f", tau {config.horizon.tau:g}"
    return (
        f"{values}; horizon {config.horizon.rule}{tau}: from lr {given.lr:g}, weight decay {given.weight_decay:g}, "
        f"eps {given.eps:g}, betas {_pair(given.betas)}"
    )


def _pair(betas: Sequence[float]) -> str:
    return "/".join(f"{beta:.4g}" for beta in betas)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Note the message of a ValueError instead of raising it, so that all problems are told at once."""
    try:
        yield
    except ValueError as error:
        problems.append(str(error))
