"""Say in words what is worth knowing of a plan: the settings that deserve a warning, and the optimizer's values."""

from collections.abc import Iterator, Sequence

from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.optimizer import OptimizerConfig
from plumbline.model import combinations
from plumbline.model.parameterization.cautions import cautions as parameterization_cautions
from plumbline.model.parameterization.sizes import sizes


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
    yield from config.guards.cautions(config.checkpoint, plan.total_steps - plan.first_step)
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
