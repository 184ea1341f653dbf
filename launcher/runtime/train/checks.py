"""Check a run before anything starts: what a start refuses at once, a submission refuses before the queue."""

from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.config.plan import RunPlan
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.models import from_stock as initial_weights
from plumbline.launcher.runtime.optim.schedule import check_phases
from plumbline.launcher.runtime.run.inputs import Inputs, open_inputs
from plumbline.launcher.runtime.system.world import World
from plumbline.launcher.runtime.train.guards.transfer import read_base


def open_checked(config: Config, plan: RunPlan, world: World, check_sizes: bool = True) -> Inputs:
    """Open what a run reads, once all that needs no other rank and no device is known to fit.

    Args:
        config: as `branch.resolve` returned it.
        plan: of this configuration.
        world: this process among all; the ranks need not have met.
        check_sizes: as `open_inputs` takes it.

    Raises:
        ValueError: the phases of the schedule are longer than the run; a corpus is not there, damaged or too small; the
            ranks cannot share a batch evenly; a branch does not continue its parent; train.initialize_from is another
            model, or of another tokenizer; or guards.transfer.base logged no sizes of updates.
    """
    check_phases(config.schedule, plan.batch_plan, plan.total_steps)
    inputs = open_inputs(config, world, check_sizes)
    branch.check(config, inputs.fingerprints)
    initial_weights.check(config)
    read_base(config.guards.transfer, most=1)  # or the guard would refuse it once the engine is built
    if world.is_main:  # it may warn, which nobody needs from every rank
        initial_weights.check_tokenizer(config, inputs)
    return inputs
