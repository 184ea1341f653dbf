"""Describe what a run is about to do, with every derived number."""

from collections.abc import Iterator

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.remarks import cautions, describe_settings
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.ranks.world import World, emulates_bf16
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.system import determinism
from plumbline.model.parameterization.sizes import sizes


def describe(config: Config, plan: RunPlan, inputs: Inputs, world: World) -> Iterator[str]:
    """Yield a few lines on what the run is about to do.

    Args:
        config: the run.
        plan: its plan.
        inputs: its training and held-out batches.
        world: this process among all; the process group need not be up.
    """
    yield f"run      {config.run.folder}, seed {config.run.seed}"
    yield from _model(config, plan)
    yield from _optimization(config, plan)
    yield from _data(config, plan, inputs, world)
    yield from _course(config, plan)
    yield from _machine(config, world)


def _model(config: Config, plan: RunPlan) -> Iterator[str]:
    """Yield what is trained, from which weights, and any warnings."""
    model = config.model
    yield (
        f"model    {model.family}, width {model.hidden_size} x depth {model.num_hidden_layers}, vocabulary "
        f"{model.vocab_size}: {totals(plan.rows).total:,} parameters"
    )
    if config.train.initialize_from is not None:
        yield f"weights  from {config.train.initialize_from}, divided by what the parameterization multiplies"
    if not config.precision.is_plain:
        yield f"rounded  {config.precision}"
    for caution in cautions(config, plan):
        yield f"warning  {caution}"


def _optimization(config: Config, plan: RunPlan) -> Iterator[str]:
    """Yield the objective and the optimizer's settings."""
    rule, size = config.parameterization, sizes(config.model, config.parameterization)
    if not config.objective.is_plain:
        work = config.objective.work(config.data.sequence_length)
        own = f"{work.own_blocks} further block(s) once, " if work.own_blocks else ""
        yield (
            f"trains   {config.objective}; for each token of the text it runs the blocks {work.blocks:.4g} times, {own}"
            f"the head {work.head:.4g} times"
        )
    yield f"base     {describe_settings(config, plan)}"
    yield (
        f"scaling  {rule.rule}, m_N {size.width:g}, m_L {size.depth:g}: hidden matrices take lr "
        f"{next(row.lr for row in plan.rows if row.role == 'hidden_matrix'):g}"
    )


def _data(config: Config, plan: RunPlan, inputs: Inputs, world: World) -> Iterator[str]:
    """Yield what is read, how much of it, and how a batch is split over the ranks."""
    data, train, total = config.data, inputs.train, plan.total_steps
    epochs = ", ".join(f"{name} {share:.2f} epochs" for name, share in train.epochs(total).items())
    yield f"data     {plan.total_tokens:,} tokens in {total:,} steps: {epochs}"
    yield from train.notes(total)
    yield f"length   {'' if config.schedule.branch is None else 'as planned for the parent: '}{plan.proportions}"
    asked = data.micro_batch_size
    unlike = "" if train.micro_batch == asked else f", where data.micro_batch_size = {asked} does not divide"
    yield (
        f"batch    {data.global_batch_size} x {data.sequence_length} tokens = {world.size} rank(s) x "
        f"{train.micro_batch} sequences{unlike} x {train.accumulation_steps} accumulation steps"
    )


def _course(config: Config, plan: RunPlan) -> Iterator[str]:
    """Yield what changes over the run (moving average, batch size, learning rate) and where a branch begins."""
    if config.train.ema_half_life_tokens is not None:
        steps = config.train.ema_half_life_tokens / plan.batch_plan.tokens_per_step
        yield f"average  moving, half-life {config.train.ema_half_life_tokens:,} tokens = {steps:.1f} steps"
    if config.data.batch_size_warmup:
        yield f"warm-up  batch of {plan.batch_plan.describe()}; learning rate scaling {config.schedule.lr_scaling}"
    yield f"schedule {plan.schedule.describe()}"
    if config.schedule.branch is not None:
        cooldown = plan.total_steps - plan.first_step
        yield f"branch   from {config.schedule.branch.checkpoint}, {cooldown:,} steps of cooldown"


def _machine(config: Config, world: World) -> Iterator[str]:
    """Yield what the run trains on, where it saves, and whether it is reproducible to the last bit."""
    yield f"engine   DeepSpeed ZeRO-{config.deepspeed.zero_stage}, {config.deepspeed.precision}, on {world.device.type}"
    if config.checkpoint.local is not None:
        shared, local = config.checkpoint.interval, config.checkpoint.local
        usual = "at the end" if shared is None else f"every {shared} steps"
        yield f"saves    {usual} to the run folder, every {local.interval} to {local.path} of each rank's own node"
    if config.run.repeats:
        yield f"repeats  {determinism.describe(world.device)}"
    if config.deepspeed.precision == "bf16" and emulates_bf16():
        yield "warning  this processor only emulates bf16: deepspeed.precision=fp32 is several times as fast"
