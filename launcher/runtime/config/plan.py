"""Derive a run's steps, tokens, learning rates and tensors from its configuration, once, before any work starts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plumbline.data.batch_plan import BatchPlan
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.horizon import scale_settings
from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig
from plumbline.launcher.runtime.optim.proportions import Proportions
from plumbline.launcher.runtime.optim.schedule import Schedule
from plumbline.model import combinations
from plumbline.model.parameterization.cautions import cautions as parameterization_cautions
from plumbline.model.parameterization.config import OptimizerSettings
from plumbline.model.parameterization.rows import ParameterRow
from plumbline.model.parameterization.sizes import sizes
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


def cautions(config: Config, plan: RunPlan) -> Iterator[str]:
    """Yield a sentence for each setting that is allowed but deserves a warning.

    The known ranges of proportions are for text, so they do not apply to a run on synthetic tasks alone.
    """
    yield from combinations.cautions(config.model)
    yield from parameterization_cautions(config.model, config.parameterization)
    yield from config.objective.cautions()
    is_wider = sizes(config.model, config.parameterization).width > 1
    base_width = config.parameterization.base_hidden_size if is_wider else None
    hidden = {row.name: row.shape for row in plan.rows if row.role == "hidden_matrix" and row.trainable}
    yield from config.optimizer.kind.cautions(config.optimizer, base_width, hidden)
    yield from config.horizon.cautions()
    yield from config.schedule.cautions(bool(config.data.batch_size_warmup))
    decay = config.optimizer.weight_decay
    if config.horizon.tau is not None and decay != OptimizerConfig.model_fields["weight_decay"].default:
        yield (
            f"optimizer.weight_decay = {decay:g} has no effect: horizon.tau = {config.horizon.tau:g} sets the decay; "
            "change horizon.tau, or set horizon.tau=null horizon.tau_exponent=0"
        )
    if config.data.packing == "best_fit" and not config.model.document_mask:
        yield (
            "data.packing = best_fit with model.document_mask = false: the documents of a sample, which have nothing "
            "to do with each other, see each other; leave document_mask out to mask them"
        )
    yield from _guard_cautions(config, plan)
    hang, timeout = config.train.hang_minutes, config.deepspeed.timeout_minutes
    if hang is not None and hang >= timeout:
        yield (
            f"train.hang_minutes = {hang:g} is not below deepspeed.timeout_minutes = {timeout:g}: NCCL ends ranks that "
            f"wait so long, and nothing names the rank they wait for; set deepspeed.timeout_minutes={1.5 * hang:g}"
        )
    traced = config.train.profile
    if traced is not None and (last := traced.start + traced.steps - 1) > plan.total_steps:
        yield (
            f"train.profile: step {last} is to be the last that is traced, and the run has {plan.total_steps}: nothing "
            "is written; choose an earlier train.profile.start or fewer train.profile.steps"
        )
    if config.schedule.branch is None and any(source.task is None for source in config.data.train):
        yield from plan.proportions.cautions()  # a branch has those of its parent


def _guard_cautions(config: Config, plan: RunPlan) -> Iterator[str]:
    """Yield cases, other than those refused, in which there may be no checkpoint before a spike."""
    saves = config.checkpoint
    steps = plan.total_steps - plan.first_step
    for name, spike in config.guards.spikes.items():
        if spike.action != "roll_back":
            continue
        if saves.local is None and saves.interval is not None and saves.interval >= steps:
            yield (
                f"guards.{name}.action = roll_back: checkpoint.interval = {saves.interval}, and the run has {steps} "
                "steps: there is nothing to go back to; lower it"
            )
            continue
        if not spike.look_back:
            continue
        if saves.interval is None:
            kept, remedy = "the one checkpoint of checkpoint.local", "set checkpoint.interval as well"
        elif saves.keep_every is None or (saves.keep_last - 1) * saves.interval >= spike.look_back:
            continue
        else:
            first = math.lcm(saves.interval, saves.keep_every)  # that stays
            if first == saves.interval:
                continue
            kept = f"before step {first + spike.look_back} the {saves.keep_last} of checkpoint.keep_last"
            remedy = "raise that"
        yield (
            f"guards.{name}.look_back = {spike.look_back}: {kept} may be of steps before a spike that are not trusted, "
            f"and the run then ends; {remedy}"
        )


def describe_settings(config: Config, plan: RunPlan) -> str:
    """Return the optimizer's values at the base size, and the given values where the horizon changed them."""
    used, given = plan.settings, config.optimizer
    values = f"lr {used.lr:g}, weight decay {used.weight_decay:g}, eps {used.eps:g}, betas {_pair(used.betas)}"
    if config.horizon.is_plain:
        return values
    if config.horizon.tau is None:
        tau, decay = "", f", weight decay {given.weight_decay:g}"
    else:
        grows = config.horizon.tau_exponent != 0
        at = f" at {config.horizon.base_tokens_per_parameter:g} tokens per parameter" if grows else ""
        tau, decay = f", tau {config.horizon.tau:g}{at}", ""
    return (
        f"{values}; horizon {config.horizon.rule}{tau}: from lr {given.lr:g}{decay}, "
        f"eps {given.eps:g}, betas {_pair(given.betas)}"
    )


def _pair(betas: Sequence[float]) -> str:
    return "/".join(f"{beta:.4g}" for beta in betas)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Collect the message of a ValueError instead of raising it, so that all problems are reported at once."""
    try:
        yield
    except ValueError as error:
        problems.append(str(error))
