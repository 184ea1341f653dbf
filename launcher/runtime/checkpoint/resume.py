"""Continue a run from its newest whole checkpoint, if it is the same run."""

import re
from collections.abc import Sequence
from pathlib import Path

from plumbline.data.damage import read_object, reading
from plumbline.data.disk import is_file
from plumbline.data.past import entered_before, renamed, same_past
from plumbline.data.skipped import NOTHING, SkippedData
from plumbline.launcher.runtime.checkpoint import tensors
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.store import (
    MANIFEST,
    STATE,
    CheckpointError,
    Heartbeat,
    TrainState,
    checkpoints,
    ending_if_unreadable,
    newest_whole,
    problems,
    read_manifest,
    silent,
    step_of,
)
from plumbline.launcher.runtime.config.identity import RESUMED, changes, differences
from plumbline.launcher.runtime.config.load import config_in
from plumbline.launcher.runtime.config.plan import last_step, plan_run
from plumbline.launcher.runtime.config.run_files import CONFIG, METRICS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.ranks.collectives import from_main, gather_objects, on_every_rank
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.chain import noted_checkpoint
from plumbline.launcher.runtime.run.interventions import read_interventions, skipped_in
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.launcher.runtime.system.tail import lines_from_end

WEIGHTS = "; to change it from here on, give the source weight_changes"
"""Advice in an error about a changed weight of a source."""
SOURCES = "data.train"
JOINS = "; to add a source from here on, give it weight: 0 and weight_changes: [{{tokens: {tokens}, weight: 1}}]"
"""Advice in an error about a source that is new, for the manifest of the checkpoint."""
LOST = (
    "; keep each source that was read (weight_changes: [{{tokens: {tokens}, weight: 0}}] ends it here), and add others "
    "with weight: 0 and weight_changes"
)
"""Advice in an error about a source that is gone, for the manifest of the checkpoint."""

RAISED = 1.5
"""Increase of the learning rate above which a resume warns."""


def find(
    root: Path,
    world: World,
    local: LocalCheckpoints | None = None,
    before: int | None = None,
    heartbeat: Heartbeat = silent,
) -> Path | None:
    """Return the newest whole checkpoint, or None if there are no checkpoints. Collective.

    Logs a warning for each damaged checkpoint that is skipped.

    Args:
        root: the folder of the run's checkpoints, which rank 0 lists.
        world: this process among all.
        local: checkpoints on the nodes.
        before: only consider checkpoints before this step, if given.
        heartbeat: called for each part of a file that was read: all of them may take longer than the watchdog's limit.

    Returns:
        A folder in `root`, the same on all ranks, or each rank's own folder in `local`, of the same step.

    Raises:
        CheckpointError: there are checkpoints in `root`, but none is whole (starting from scratch would hide that), or
            the newest has another format; or one could not be read (UnreadError).
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
    """Refuse to start a run from scratch if all its checkpoints are damaged.

    Raises:
        CheckpointError: there are damaged checkpoints.
    """
    if damaged:
        raise CheckpointError(f"{root}: no whole checkpoint among {len(damaged)}; {_anew(root.parent)}")


def check_not_lost(config: Config) -> None:
    """Refuse to begin a run without a checkpoint in a folder that has another run's record, or one of a checkpoint.

    A checkpoint that is missing may be found again, and the record of another run would be overwritten. If the same run
    has made steps there, a warning says that they are made again.

    Args:
        config: the run. It must not be a branch, which begins at its parent's checkpoint and can go back there.

    Raises:
        CheckpointError: the records mention a checkpoint, or are of other values.
    """
    run = config.run.folder
    noted = noted_checkpoint(run)
    if noted is not None:
        raise CheckpointError(
            f"{run / 'checkpoints'}: that of step {noted}, and all others, are gone: put it back; {_anew(run)}"
        )
    metrics = run / METRICS
    newest = next((line.item for line in lines_from_end(metrics)), None) if is_file(metrics) else None
    if newest is None or not is_file(run / CONFIG):
        return
    try:
        before = config_in(run)
    except ValueError as error:
        raise CheckpointError(f"{error}; {_anew(run)}") from error
    if lines := differences(before, config, RESUMED):
        values = "".join(f"\n  {line}" for line in lines)
        raise CheckpointError(f"{run} has the record of a run of other values; {_anew(run)}, or undo:{values}")
    elsewhere = "" if config.checkpoint.local is None else "unless its nodes have one, "
    LOG.warning(
        f"{run}: an earlier attempt came to step {newest.get('step')} and saved no checkpoint there: {elsewhere}all "
        "steps are made again; a lower checkpoint.interval saves them"
    )


def _anew(run: Path) -> str:
    return f"to start from scratch, remove {run} or give this run another run.name"


def damage(folder: Path, world: World, heartbeat: Heartbeat) -> list[str]:
    """Return the problems of a checkpoint after full verification; each rank reads a share of the files. Collective.

    Raises:
        UnreadError: on all ranks, if one could not read its share. That is not damage: to skip the checkpoint would
            discard the training since the previous one.
        FormatError: on all ranks, if the checkpoint is whole but has another format version.
    """

    def read() -> list[str]:
        with ending_if_unreadable(f"{folder}, by rank {world.rank},"):
            return problems(folder, contents=True, share=slice(world.rank, None, world.size), heartbeat=heartbeat)

    shares = gather_objects(on_every_rank(read, world), world)
    return list(dict.fromkeys(problem for share in shares for problem in share))


def load(engine: Engine, folder: Path, heartbeat: Heartbeat = silent) -> TrainState:
    """Load the engine's state from a checkpoint that `find` returned, and return the training state. Collective.

    Args:
        engine: the engine to load into.
        folder: the checkpoint.
        heartbeat: called for each tensor that was read.

    Raises:
        UnreadError: on all ranks, if a file could not be read.
    """
    with ending_if_unreadable(folder):
        state = on_every_rank(lambda: read_state(folder), engine.world)
        tensors.restore(engine, folder, heartbeat)
    return state


def read_state(folder: Path) -> TrainState:
    """Return the training state in a checkpoint.

    Raises:
        CheckpointError: the state is invalid or contradicts the manifest.
    """
    with reading(folder / STATE):
        state = TrainState.from_json(read_object(folder / STATE))
    manifest = read_manifest(folder)
    for name, value in state.facts.items():
        if value != manifest.get(name):
            raise CheckpointError(f"{folder / STATE}: {name} = {value!r}, and in {MANIFEST} {manifest.get(name)!r}")
    return state


def skipped_data(run: Path, found: Path | None) -> SkippedData:
    """Return the data that a run skips from a checkpoint on, by the checkpoint and by the run's own record.

    Args:
        run: its folder.
        found: the checkpoint, which may be another run's, or None.
    """
    saved = NOTHING if found is None else read_state(found).skipped
    return saved | skipped_in(read_interventions(run))


def tell(engine: Engine, folder: Path, state: TrainState) -> None:
    """Log where an engine resumes, and what has changed since the checkpoint was written."""
    TRAINING.info(f"resuming after step {state.step} from {folder}")
    tell_changes(folder, engine.config)
    if layout := other_layout(folder, engine.config, engine.world):
        TRAINING.info(layout)
    if engine.ema is not None and engine.ema.tokens == 0:
        TRAINING.info("the moving average starts here: the checkpoint has none of this half-life")


def other_layout(folder: Path, config: Config, world: World) -> str | None:
    """Return how the ranks that wrote a checkpoint differ from these in number or ZeRO stage, or None if they do not.

    With the same number of ranks and stage, training continues bit for bit; otherwise sums are taken in another order,
    unless both runs are reproducible on any number of ranks. Stage 0 computes bf16 by autocast, which sums differently.
    """
    manifest = read_manifest(folder)
    before = f"{manifest['world_size']} rank(s) at ZeRO stage {manifest['zero_stage']}"
    now = f"{world.size} rank(s) at ZeRO stage {config.deepspeed.zero_stage}"
    if before == now:
        return None
    old = config_in(folder)
    on_any = None not in (old.run.reproducible, config.run.reproducible) and (
        (old.deepspeed.zero_stage == 0) == (config.deepspeed.zero_stage == 0)
        and old.data.micro_batch_size == config.data.micro_batch_size
    )
    equal = "to the last bit" if on_any else "up to the order of summation"
    text = f"written by {before}, read by {now}: the same samples in every step, losses equal {equal}"
    return text if manifest["world_size"] == world.size else f"{text}; diagnostics look at samples of other ranks"


def tell_changes(folder: Path, config: Config) -> None:
    """Log each key whose value changes from this checkpoint on, and warn of surprising effects."""
    old = config_in(folder)
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
    """Return a warning that the new configuration raises the learning rate after a step, or None if it hardly does.

    Both rates are compared at the same step, the last one taken, because a warm-up raises the rate anyway.
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
    """Refuse to resume a checkpoint with a configuration or text that it does not allow; see `check_resume`."""
    check_resume(config_in(folder), config, corpora, folder)


def check_resume(
    old: Config,
    new: Config,
    corpora: dict[str, str],
    folder: Path,
    remedy: str = "give this one another run.name, or undo",
) -> None:
    """Refuse a resume that changes what a run must keep until it ends: keys (config/identity.py) and text.

    The mixture of the data may change from the checkpoint on; what was drawn before it may not.

    Args:
        old: the configuration in the checkpoint.
        new: the configuration that wants to resume.
        corpora: name -> fingerprint of the current training corpora.
        folder: the checkpoint.
        remedy: advice in the error.

    Raises:
        CheckpointError: names each difference, or a missing source without which they cannot be determined.
    """
    manifest = read_manifest(folder)
    drawn = manifest["corpora"]
    if old.data.train != new.data.train and _same_past(old, new, corpora, folder):
        drawn = entered_before(old.data, _data_steps_drawn(folder), drawn)  # one that was to join may go
        old = old.model_copy(update={"data": old.data.model_copy(update={"train": new.data.train})})
    found = changes(old, new, RESUMED)
    joins = ""
    if SOURCES in found:  # of other numbers of them: their names, not all of their keys
        was, becomes = ([source.label for source in config.data.train] for config in (old, new))
        found[SOURCES] = was, becomes
        joins = JOINS.format_map(manifest) if set(becomes) - set(was) else ""
    lines = [
        f"  {path}: {was!r} -> {becomes!r}{joins if path == SOURCES else _way_out(path)}"
        for path, (was, becomes) in found.items()
    ]
    total_steps = last_step(new)
    if manifest["step"] > total_steps:
        raise CheckpointError(
            f"{folder} is at step {manifest['step']}, beyond the {total_steps} that train.steps (or train.tokens) "
            "asks for: raise it, or give this run another run.name"
        )
    known = {name: corpora.get(name) for name in drawn}
    if drawn != known:  # the text at the same path may have changed
        way_out = renamed(drawn, corpora) or (LOST.format_map(manifest) if None in known.values() else "")
        lines.append(f"  corpora: {drawn!r} -> {known!r}{way_out}")
    if lines:
        raise CheckpointError(f"{folder} was written by a run of other values; {remedy}:\n" + "\n".join(lines))


def _way_out(path: str) -> str:
    """Return how a resumed run can change a value after all, beginning with a semicolon, or "" if it cannot."""
    return WEIGHTS if re.fullmatch(r"data\.train\.\d+\.weight", path) else ""


def _same_past(old: Config, new: Config, corpora: dict[str, str], folder: Path) -> bool:
    try:
        return same_past(old.data, new.data, _data_steps_drawn(folder), read_manifest(folder)["corpora"], corpora)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _data_steps_drawn(folder: Path) -> int:
    """Return the number of data steps that a checkpoint's run has used up: its steps, and those skipped among them."""
    state = read_state(folder)
    return state.skipped.data_step(state.step - 1) + 1 if state.step else 0
