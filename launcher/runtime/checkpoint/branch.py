"""Branch off a run: cool down from a checkpoint of the parent run in a separate run folder.

The branch takes weights, optimizer states and the position in the data from the checkpoint, and cools down from the
parent's learning rate there, perhaps in another precision. The parent is only read. The starting point is determined
once and kept in the branch's config.yaml, and training saves it as the branch's own first checkpoint before anything
else. From then on the same command resumes the branch whatever the parent saves or deletes.
"""

from pathlib import Path

from plumbline.data.disk import is_there
from plumbline.launcher.runtime.checkpoint.resume import check_not_lost, check_resume, damage
from plumbline.launcher.runtime.checkpoint.store import (
    CheckpointError,
    Heartbeat,
    checkpoints,
    newest_whole,
    problems,
    read_manifest,
    silent,
    step_of,
)
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.identity import differences
from plumbline.launcher.runtime.config.load import config_in, load_config
from plumbline.launcher.runtime.config.plan import last_step, plan_run
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS, CONFIG
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.optim.schedule import BranchConfig
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World

MOST_NAMED = 10
"""Checkpoints that are offered in the place of one that cannot be used: the newest."""


def resolve(config: Config) -> Config:
    """Return the configuration with one checkpoint and its step in schedule.branch, or unchanged without a branch.

    Logs a warning for each damaged checkpoint that is skipped.

    Raises:
        ConfigError: the run folder belongs to another run.
        CheckpointError: there is no whole checkpoint where schedule.branch.checkpoint points.
    """
    branch = config.schedule.branch
    if branch is None:
        return config
    if is_there(config.run.folder / CONFIG):
        branch = _started(config, branch)
    else:
        folder = _parent_of(Path(branch.checkpoint))
        facts = {"checkpoint": str(folder), "from_step": read_manifest(folder)["step"]}
        branch = branch.model_copy(update=facts)
    return _with_branch(config, branch)


def check(config: Config, corpora: dict[str, str]) -> None:
    """Refuse a branch that would not continue its parent; file sizes are checked here, contents by `start`.

    Args:
        config: as `resolve` returned it.
        corpora: name -> fingerprint of the training corpora.

    Raises:
        CheckpointError: the parent's checkpoint is missing or damaged, lies in its warm-up or decay, or has another
            model, parameterization, data order, seed, learning rate or precision of training.
    """
    branch = config.schedule.branch
    if branch is None or checkpoints(config.run.folder / CHECKPOINTS):
        return
    folder, step = Path(branch.checkpoint), branch.first_step
    # A run folder without checkpoints is of a start that was killed before it saved the first
    _refuse(folder, problems(folder), has_begun=is_there(config.run.folder / CONFIG))
    parent = config_in(folder)
    # A branch differs from its parent in schedule.branch, and perhaps in precision; `check_resume` compares the rest
    like = _with_branch(parent, branch).model_copy(update={"precision": config.precision})
    check_resume(like, config, corpora, folder, remedy="a branch continues its parent, so undo")
    _check_length(config, parent, folder)

    plan = plan_run(parent)
    batch_plan, rates = plan.batch_plan, plan.schedule
    tokens = batch_plan.tokens_before(step)
    if not rates.warmup_end <= tokens <= rates.decay_start:
        first, last = batch_plan.steps_for(rates.warmup_end), batch_plan.steps_for(rates.decay_start + 1) - 1
        raise CheckpointError(
            f"{folder} is at step {step}, and the rate of its run is at its peak from step {first} to {last}: branch "
            "from a checkpoint between the two"
        )
    before, after = plan.lr_after(tokens), plan_run(config).lr_after(tokens)
    if before != after:
        raise CheckpointError(
            f"optimizer.lr: {folder} was trained at a rate of {before:g} and the branch would start at {after:g}: take "
            f"the parent's values (--config {folder / 'config.yaml'})"
        )


def start(config: Config, world: World, heartbeat: Heartbeat = silent) -> Path | None:
    """Return the parent's checkpoint, fully verified, from which a branch begins. Collective.

    Returns None for a run that is not a branch and begins with new weights.

    Args:
        config: a run without checkpoints.
        world: this process among all.
        heartbeat: called for each part of a file that was read.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    branch = config.schedule.branch
    if branch is None:
        from_main(lambda: check_not_lost(config), world)
        return None
    folder = Path(branch.checkpoint)
    _refuse(folder, damage(folder, world, heartbeat))
    return folder


def _started(config: Config, asked: BranchConfig) -> BranchConfig:
    """Return the branch in the run folder, if it is the requested one."""
    folder = config.run.folder
    found = config_in(folder).schedule.branch
    if found is None:
        raise ConfigError(f"run.name = {config.run.name}: {folder} is not a branch; give this one another run.name")
    from_run = Path(asked.checkpoint) / CHECKPOINTS == Path(found.checkpoint).parent
    same = {"from_step": found.from_step} | ({"checkpoint": found.checkpoint} if from_run else {})
    lines = differences(_with_branch(config, found), _with_branch(config, asked.model_copy(update=same)))
    if lines:
        raise ConfigError(
            f"{folder} is another branch; give this one another run.name, or undo:\n  " + "\n  ".join(lines)
        )
    return found


def _with_branch(config: Config, branch: BranchConfig) -> Config:
    """Return the configuration with another schedule.branch."""
    return config.model_copy(update={"schedule": config.schedule.model_copy(update={"branch": branch})})


def _parent_of(path: Path) -> Path:
    """Return the checkpoint itself, or the newest complete one of a run folder."""
    if not (path / CHECKPOINTS).is_dir():
        _refuse(path, problems(path))
        return path
    newest = newest_whole(checkpoints(path / CHECKPOINTS), problems)
    if newest is None:
        raise CheckpointError(f"schedule.branch.checkpoint = {path}: this run has no whole checkpoint")
    return newest


def _refuse(folder: Path, found: list[str], has_begun: bool = False) -> None:
    if found:
        there = [
            f"{step_of(other):,}" for other in reversed(checkpoints(folder.parent)[:MOST_NAMED]) if other != folder
        ]
        others = f": {folder.parent} has those of steps {', '.join(there)}" if there else ""
        aside = ", and give the branch another run.name" if has_begun else ""
        raise CheckpointError(
            f"schedule.branch.checkpoint = {folder}: no whole checkpoint: {'; '.join(found[:3])}; name another one"
            f"{aside}{others}"
        )


def _check_length(config: Config, parent: Config, folder: Path) -> None:
    """Refuse a train.steps or train.tokens other than the parent's: it would not have the effect it suggests."""
    run = folder.parent.parent / CONFIG  # newer than the checkpoint's if the run was extended since
    known = [parent.train, *([load_config(run, []).train] if run.exists() else [])]
    if (config.train.steps, config.train.tokens) not in [(train.steps, train.tokens) for train in known]:
        raise CheckpointError(
            f"train.steps = {config.train.steps}, train.tokens = {config.train.tokens}: with schedule.branch they stay "
            f"the parent's ({parent.train.steps} and {parent.train.tokens}), and the run ends with its cooldown, at "
            f"step {last_step(config)}; set the length under schedule.branch"
        )
