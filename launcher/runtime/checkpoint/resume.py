"""Continue a run from its newest whole checkpoint, if it is the same run."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from plumbline.data.damage import reading
from plumbline.data.past import renamed, same_past
from plumbline.data.skipped import NOTHING, SkippedData
from plumbline.launcher.runtime.checkpoint import tensors
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.store import (
    MANIFEST,
    STATE,
    CheckpointError,
    TrainState,
    checkpoints,
    ending_if_unreadable,
    newest_whole,
    problems,
    read_manifest,
    step_of,
)
from plumbline.launcher.runtime.config.identity import RESUMED, differences
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import last_step, plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.run.chain import noted_checkpoint
from plumbline.launcher.runtime.run.interventions import read_interventions, skipped_in
from plumbline.launcher.runtime.system.collectives import from_main, gather_objects, on_every_rank
from plumbline.launcher.runtime.system.files import read_object
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.system.world import World

WEIGHTS = "; to change it from here on, give the source weight_changes"
"""What is said of another weight of a source."""

RAISED = 1.5
"""Times the learning rate before, above which a resume warns."""


def find(
    root: Path,
    world: World,
    local: LocalCheckpoints | None = None,
    before: int | None = None,
    heartbeat: Callable[[], object] = lambda: None,
) -> Path | None:
    """Return the newest whole checkpoint; None when there are none at all. Collective.

    Logs a warning for each that is passed over.

    Args:
        root: the folder of the run's checkpoints; what is in it is said by rank 0.
        world: this process among all.
        local: checkpoints on the nodes.
        before: a step that it must be of an earlier one than; None: any.
        heartbeat: is told of each part of a file that was read: all parts may take longer than a watchdog bears.

    Returns:
        A folder in `root`, the same on all ranks, or each rank's own in `local`, of the same step.

    Raises:
        CheckpointError: there are checkpoints in `root` and none is whole (starting from scratch would hide that), or
            the newest is of another format; or one could not be read (UnreadError).
    """
    with ending_if_unreadable(root):
        shared = from_main(lambda: checkpoints(root), world)
    nearby = [] if local is None else local.candidates()
    early = [folder for folder in [*shared, *nearby] if before is None or step_of(folder) < before]
    candidates = sorted(early, key=lambda folder: (step_of(folder), folder in shared), reverse=True)

    def check(folder: Path) -> list[str]:
        return (
            damage(folder, world, heartbeat) if local is None or folder in shared else local.damage(folder, heartbeat)
        )

    newest = newest_whole(candidates, check)
    if newest is None and before is None:
        check_any(root, shared)
    return newest


def check_any(root: Path, damaged: Sequence[Path]) -> None:
    """Refuse to begin a run anew where there are checkpoints, none of them whole.

    Raises:
        CheckpointError: there are some.
    """
    if damaged:
        raise CheckpointError(f"{root}: no whole checkpoint among {len(damaged)}; {_anew(root.parent)}")


def check_not_lost(run: Path) -> None:
    """Refuse to begin a run anew, over its records, that tells of a checkpoint and has none: it may be found again.

    Args:
        run: its folder. It is no branch: that begins at its parent's checkpoint, and goes back to there.

    Raises:
        CheckpointError: it tells of one.
    """
    noted = noted_checkpoint(run)
    if noted is not None:
        raise CheckpointError(
            f"{run / 'checkpoints'}: that of step {noted}, and all others, are gone: put it back; {_anew(run)}"
        )


def _anew(run: Path) -> str:
    return f"to start from scratch, remove {run} or give this run another run.name"


def damage(folder: Path, world: World, heartbeat: Callable[[], object] = lambda: None) -> list[str]:
    """Return what is wrong with a checkpoint, to the last byte; each rank reads a share of the files. Collective.

    Raises:
        UnreadError: on all ranks, one could not read its share. That is no damage: to pass the checkpoint over would
            throw away what was trained since the one before.
        FormatError: on all ranks, it is whole, and of another version.
    """

    def read() -> list[str]:
        with ending_if_unreadable(f"{folder}, by rank {world.rank},"):
            return problems(folder, contents=True, share=slice(world.rank, None, world.size), heartbeat=heartbeat)

    shares = gather_objects(on_every_rank(read, world), world)
    return list(dict.fromkeys(problem for share in shares for problem in share))


def load(engine: Engine, folder: Path, heartbeat: Callable[[], object] = lambda: None) -> TrainState:
    """Read the engine's state from a checkpoint that `find` returned, and return where training stands. Collective.

    Args:
        engine: what trains.
        folder: the checkpoint.
        heartbeat: is told of each tensor that was read.

    Raises:
        UnreadError: on all ranks, a file could not be read.
    """
    with ending_if_unreadable(folder):
        state = on_every_rank(lambda: read_state(folder), engine.world)
        tensors.restore(engine, folder, heartbeat)
    return state


def read_state(folder: Path) -> TrainState:
    """Return where training stands in a checkpoint.

    Raises:
        CheckpointError: its state is none, or contradicts its manifest.
    """
    with reading(folder / STATE):
        state = TrainState.from_json(read_object(folder / STATE))
    manifest = read_manifest(folder)
    for name, value in state.facts.items():
        if value != manifest.get(name):
            raise CheckpointError(f"{folder / STATE}: {name} = {value!r}, and in {MANIFEST} {manifest.get(name)!r}")
    return state


def skipped_data(run: Path, found: Path | None) -> SkippedData:
    """Return the data that a run leaves out from a checkpoint on: by the checkpoint, and by the run's own record.

    Args:
        run: its folder.
        found: the checkpoint, which may be another run's; None: there is none.
    """
    saved = NOTHING if found is None else read_state(found).skipped
    return saved | skipped_in(read_interventions(run))


def tell(engine: Engine, folder: Path, state: TrainState) -> None:
    """Log from where an engine goes on, and what is otherwise than when the checkpoint was written."""
    TRAINING.info(f"resuming after step {state.step} from {folder}")
    tell_changes(folder, engine.config)
    if layout := other_layout(folder, engine.config, engine.world):
        TRAINING.info(layout)
    if engine.ema is not None and engine.ema.tokens == 0:
        TRAINING.info("the moving average starts here: the checkpoint has none of this half-life")


def other_layout(folder: Path, config: Config, world: World) -> str | None:
    """Say how the ranks that wrote a checkpoint differ from these in number or ZeRO stage; None: they do not.

    On the same number at the same stage, training goes on to the same bits; on others sums are taken in another order,
    unless both write the bits of any number of ranks. Stage 0 computes in bf16 by autocast, which is another sum.
    """
    manifest = read_manifest(folder)
    before = f"{manifest['world_size']} rank(s) at ZeRO stage {manifest['zero_stage']}"
    now = f"{world.size} rank(s) at ZeRO stage {config.deepspeed.zero_stage}"
    if before == now:
        return None
    old = load_config(folder / "config.yaml", [])
    on_any = None not in (old.run.reproducible, config.run.reproducible) and (
        (old.deepspeed.zero_stage == 0) == (config.deepspeed.zero_stage == 0)
        and old.data.micro_batch_size == config.data.micro_batch_size
    )
    equal = "to the last bit" if on_any else "up to the order of summation"
    text = f"written by {before}, read by {now}: the same samples in every step, losses equal {equal}"
    return text if manifest["world_size"] == world.size else f"{text}; diagnostics look at samples of other ranks"


def tell_changes(folder: Path, config: Config) -> None:
    """Log each key that has another value than when the checkpoint was written, and from here on."""
    old = load_config(folder / "config.yaml", [])
    for line in differences(old, config):
        TRAINING.info(f"changed  {line}")
    if old.data.micro_batch_size != config.data.micro_batch_size and config.train.eval_batches is not None:
        LOG.warning(
            f"train.eval_batches = {config.train.eval_batches} counts micro-batches: with another "
            "data.micro_batch_size other held-out text is scored, and scores before and after do not compare"
        )
    if raised := _raised_rate(old, config, step_of(folder)):
        LOG.warning(raised)


def _raised_rate(old: Config, new: Config, step: int) -> str | None:
    """Say that the learning rate goes up after a step by what was configured anew; None: it does not, or hardly.

    Both rates are compared for the same step, the last one that was made: a warm-up raises it without a change.
    """
    before, after = plan_run(old), plan_run(new)
    last = before.batch_plan.tokens_before(step - 1)
    was = before.lr_after(last)
    if after.lr_after(last) <= RAISED * was:
        return None
    becomes = after.lr_after(after.batch_plan.tokens_before(step))
    return (
        f"the learning rate goes up, from {was:.3g} in step {step} to {becomes:.3g} in step {step + 1}, which undoes "
        "what a decay has gained: keep the length, the schedule and optimizer.lr, or branch from a checkpoint before "
        "the decay (schedule.branch, docs/schedules.md)"
    )


def check_saved(folder: Path, config: Config, corpora: dict[str, str]) -> None:
    """Refuse to go on from a checkpoint with another configuration or text than it allows; see `check_resume`."""
    check_resume(load_config(folder / "config.yaml", []), config, corpora, folder)


def check_resume(
    old: Config,
    new: Config,
    corpora: dict[str, str],
    folder: Path,
    remedy: str = "give this one another run.name, or undo",
) -> None:
    """Refuse a resume that contradicts what a run keeps until it ends: keys (config/identity.py) and text.

    The mixture of the data may change from the checkpoint on; what was drawn before it may not.

    Args:
        old: the configuration in the checkpoint.
        new: the configuration that wants to resume.
        corpora: name -> fingerprint of the training corpora as they are now.
        folder: the checkpoint.
        remedy: what the error says to do.

    Raises:
        CheckpointError: names each difference; or the source that is gone, so that they cannot be told.
    """
    manifest = read_manifest(folder)
    if old.data.train != new.data.train and _same_past(old, new, corpora, folder):
        old = old.model_copy(update={"data": old.data.model_copy(update={"train": new.data.train})})
    lines = [f"  {line}{_way_out(line)}" for line in differences(old, new, RESUMED)]
    total_steps = last_step(new)
    if manifest["step"] > total_steps:
        raise CheckpointError(
            f"{folder} is at step {manifest['step']}, beyond the {total_steps} that train.steps (or train.tokens) "
            "asks for: raise it, or give this run another run.name"
        )
    known = {name: corpora.get(name) for name in manifest["corpora"]}
    if manifest["corpora"] != known:  # the same path may hold another text by now
        lines.append(f"  corpora: {manifest['corpora']!r} -> {known!r}{renamed(manifest['corpora'], corpora)}")
    if lines:
        raise CheckpointError(f"{folder} was written by a run of other values; {remedy}:\n" + "\n".join(lines))


def _way_out(difference: str) -> str:
    """Return how a run that goes on may have another value after all, behind a semicolon, where there is a way."""
    return WEIGHTS if re.match(r"data\.train\.\d+\.weight:", difference) else ""


def _same_past(old: Config, new: Config, corpora: dict[str, str], folder: Path) -> bool:
    try:
        return same_past(old.data, new.data, _data_steps_drawn(folder), read_manifest(folder)["corpora"], corpora)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _data_steps_drawn(folder: Path) -> int:
    """Return how far in the order of data a checkpoint's run has come: its steps, and what was left out among them."""
    state = read_state(folder)
    return state.skipped.data_step(state.step - 1) + 1 if state.step else 0
