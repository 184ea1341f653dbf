"""Make trainers for tests: without a status file, a watchdog that watches and checkpoints on the nodes."""

from collections.abc import Callable

from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.engine.base import Engine
from plumbline.launcher.runtime.engine.make import make_engine
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.status import RunStatus
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.train.loop import Trainer
from plumbline.launcher.runtime.train.watchdog import Watchdog

MakeEngine = Callable[[Config, World], Engine]


def make_trainer(config: Config, inputs: Inputs, world: World, make: MakeEngine = make_engine) -> Trainer:
    """Return a trainer at the start of a run, which nobody asks to stop; make the run's folder if it is not there."""
    config.run.folder.mkdir(parents=True, exist_ok=True)
    watchdog = Watchdog(config.run.folder / "stacks", world, minutes=None)
    return Trainer(make(config, world), inputs, StopRequest(), None, RunStatus(), watchdog)
