"""Check a run before anything starts: what a start refuses at once, a submission refuses before the queue."""

from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.doctor.start import check_start
from plumbline.launcher.runtime.models import from_stock as initial_weights
from plumbline.launcher.runtime.optim.schedule import check_phases
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.trackers import check_trackers
from plumbline.launcher.runtime.train.guards.transfer import read_base


def open_checked(config: Config, plan: RunPlan, world: World, alone: bool = True) -> Inputs:
    """Check what a process can check without other ranks or a device, and open what the run reads.

    Args:
        config: as `branch.resolve` returned it.
        plan: of this configuration.
        world: this process among all; the ranks need not have met.
        alone: whether no other process checks the same; if one does, call `check_together` once they have met.

    Raises:
        ValueError: the phases of the schedule are longer than the run; a corpus is missing, damaged or too small; the
            ranks cannot share a batch evenly; a branch does not continue its parent; train.initialize_from is another
            model, or of another tokenizer; or guards.transfer.base logged no sizes of updates.
    """
    check_phases(config.schedule, plan.batch_plan, plan.total_steps)
    inputs = open_inputs(config, world)
    branch.check(config, inputs.fingerprints)
    initial_weights.check(config)
    read_base(config.guards.transfer, most=1)  # otherwise the guard would refuse it only once the engine is built
    if alone:
        inputs.check_sizes()
        initial_weights.check_tokenizer(config, inputs)
    return inputs


def check_together(config: Config, plan: RunPlan, inputs: Inputs, world: World) -> None:
    """Make the checks that need all ranks, and on rank 0 those whose result is the same on all ranks. Collective.

    Rank 0 alone checks the files of corpora, which may be too many for every rank to check, and warns. A single process
    has done this before: `pretrain.py` checks the trackers, and `open_checked` the rest.

    Raises:
        ValueError: on all ranks alike, if a file of a corpus has another size than its manifest says, if
            train.initialize_from has another tokenizer, if a tracker of metrics.trackers cannot work here, or if
            `check_start` refuses nodes or a disk.
    """

    def check_for_all() -> None:
        inputs.check_sizes()
        initial_weights.check_tokenizer(config, inputs)
        check_trackers(config.metrics.trackers)

    if world.size > 1:
        from_main(check_for_all, world)
    check_start(config, plan, world)
