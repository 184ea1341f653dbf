"""Train a run from its newest checkpoint to its last step: find the checkpoint, prepare the folder, train, clean up."""

from functools import partial

from plumbline.launcher.runtime.checkpoint import branch, resume
from plumbline.launcher.runtime.checkpoint import store as checkpoint
from plumbline.launcher.runtime.checkpoint.local import LocalCheckpoints
from plumbline.launcher.runtime.checkpoint.publishing import put_back, tidy
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.models.from_stock import fetch, initial_weights
from plumbline.launcher.runtime.ranks.collectives import from_main, on_every_rank
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.folder import prepare_run_folder
from plumbline.launcher.runtime.run.inputs import Inputs, check_agreement
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.guards.guard import TrainingError
from plumbline.launcher.runtime.train.loop import Trainer
from plumbline.launcher.runtime.train.watchdog import Watchdog, watch


def train(
    config: Config,
    inputs: Inputs,
    world: World,
    stop: StopRequest,
    status: RunStatus | None = None,
    watchdog: Watchdog | None = None,
) -> bool:
    """Train to the last step, or until a rank is asked to stop. Returns whether the run is complete.

    Args:
        config: the run.
        inputs: its training and held-out batches.
        world: this process among all; the process group must be up.
        stop: set when the run is asked to stop.
        status: status file of the run.
        watchdog: watchdog that already watches this process; None starts one.

    Raises:
        ValueError: the run folder or its checkpoints cannot be used with this configuration; an essential checkpoint,
            of the last step or of a request to stop, was not written (UnsavedError); or a checkpoint could not be read
            (UnreadError).
        TrainingError: the gradient, the loss or the weights are not finite, and the run cannot go back; or ranks
            differ.
    """
    status, watchdog = status or RunStatus(), watchdog or watch(config, world)
    watchdog.tell = status.end
    with watchdog:
        watchdog.ranks_have_met()
        trainer = make_trainer(config, inputs, world, stop, status, watchdog)
        from_main(lambda: None, world)  # all ranks have arrived, and defer a stop at nearly the same time
        stop.defer()  # from here on a stop has something to save
        try:
            complete = trainer.run()
        except TrainingError:
            trainer.give_up()
            raise
        finally:
            trainer.close()
    trainer.clean_up()
    return complete


def make_trainer(
    config: Config, inputs: Inputs, world: World, stop: StopRequest, status: RunStatus, watchdog: Watchdog
) -> Trainer:
    """Prepare the run folder and return a trainer at the newest checkpoint, or at the start."""
    check_agreement(config, inputs, world)
    root = config.run.folder / CHECKPOINTS
    local = None if config.checkpoint.local is None else LocalCheckpoints(config, world)
    verifying = partial(watchdog.beat, "verifying checkpoints to the last byte")
    with checkpoint.ending_if_unreadable(root):
        from_main(partial(put_back, root), world)
    found = resume.find(root, world, local, heartbeat=verifying)
    if found is not None:
        with checkpoint.ending_if_unreadable(found):
            on_every_rank(partial(resume.check_saved, found, config, inputs.fingerprints), world)
        from_main(partial(tidy, root, found), world)
    else:
        found = branch.start(config, world, verifying)
    watchdog.beat("starting")
    if local is not None:
        local.tidy(found)
    step = 0 if found is None else checkpoint.step_of(found)
    from_main(lambda: prepare_run_folder(config, inputs, world, step), world)
    weights = None
    if found is None:
        watchdog.suspend()  # for a download
        fetch(config, world)
        watchdog.beat("starting")
        weights = initial_weights(config)
    engine = make_engine(config, world, weights, restored=found is not None)
    trainer = Trainer(engine, inputs, stop, local, status, watchdog)
    if found is not None:
        watchdog.beat("reading the checkpoint")
        trainer.resume(found)
    return trainer
