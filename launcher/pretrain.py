# PYTHON_ARGCOMPLETE_OK
"""Pretrain a model: configuration -> model -> data -> DeepSpeed engine -> loop.

    deepspeed --quiet launcher/pretrain.py --config configs/quickstart.yaml             every GPU of this node
    deepspeed --quiet --num_accelerators 2 launcher/pretrain.py --config configs/quickstart.yaml   two CPU processes
    python launcher/pretrain.py --config configs/quickstart.yaml optimizer.lr=0.002     one process
    python launcher/pretrain.py --config configs/quickstart.yaml --dry-run              check it, show the first batch
    python launcher/submit.py --config configs/completep-base.yaml --nodes 4 --gpus-per-node 8 --cpus-per-task 12  Slurm

A cooldown from a checkpoint of another run is schedule.branch (docs/schedules.md).
The same command again resumes from the newest whole checkpoint, or says that the run is complete.

Exit codes:
    0   complete
    2   unusable configuration, data or run folder
    3   training broke down: the gradient, the loss or the weights are not finite
    85  asked to stop (SIGUSR1, SIGTERM, Ctrl-C, a closed terminal, a launcher that died, a Slurm time limit that is
        near); a checkpoint was written if a step was made
    86  no progress for train.hang_minutes
    87  a node computed wrong numbers or has a broken GPU
    88  a checkpoint could not be written
    89  a run that had trained could not reach data, a checkpoint, a disk, ranks or suitable nodes
After 85 to 89, the same command continues from the last checkpoint.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.system import imports
from plumbline.launcher.runtime.system.before_torch import announce, slurm_ranks
from plumbline.launcher.runtime.system.exit_codes import COMPLETE, CRASHED, REQUEUE, UNUSABLE
from plumbline.launcher.runtime.system.log import LOG, TRAINING, own_rank, stamp_lines
from plumbline.launcher.runtime.system.node_folder import use_node_folder
from plumbline.launcher.runtime.system.signals import StopRequest
from plumbline.launcher.runtime.system.threads import sleep_while_waiting

STOP = StopRequest()  # ahead of the imports below: they take seconds, in which a signal would kill the job


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run (see configs/)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--print-config", action="store_true", help="print the configuration with every default, and end")
    only.add_argument("--dry-run", action="store_true", help="check all, show the first batch; do not train or write")
    cli.add_rank_options(parser)
    return parser.parse_intermixed_args()


def begin() -> None:
    """Log what starts, or why it cannot, as far as that is known before the imports below, which take seconds."""
    arguments = parse_arguments()
    from plumbline.launcher.runtime.config.written import read_values  # takes a moment; STOP handles signals meanwhile

    try:
        read_values(arguments.config, arguments.overrides)
    except (ValueError, OSError) as error:
        os.environ.update(slurm_ranks(os.environ))  # an error names its rank
        sys.exit(log_once(error, cli.code_of_refusal(error)))
    if not arguments.print_config:  # a program may read the output of --print-config
        announce()
    sleep_while_waiting()
    use_node_folder()
    imports.begin()


def log_once(error: Exception, code: int, of_all: bool = False) -> int:
    """Log an error, only on rank 0 if other ranks have it as well, and return its exit code.

    Args:
        error: what went wrong.
        code: the exit code.
        of_all: whether all ranks are known to have this error.
    """
    STOP.defer()  # or a launcher that ends this rank would change its exit code
    if own_rank() != "0":
        # Most errors occur on every rank. Rank 0 logs them, and its exit makes most launchers end the other ranks, so
        # only a rank that fails alone lives long enough to log.
        time.sleep(5)
        if of_all:
            return code
    LOG.error(error)
    return code


if __name__ == "__main__":
    STOP.end_at_once(at_second_interrupt=True)  # until `train` is about to make its first step
    begin()


from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.checkpoint.newest import newest_checkpoint
from plumbline.launcher.runtime.cluster.deadline import watch_time_limit
from plumbline.launcher.runtime.config.load import as_yaml, load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.written import read_run
from plumbline.launcher.runtime.engine.stage import choose_stage
from plumbline.launcher.runtime.ranks import process_group
from plumbline.launcher.runtime.ranks.collectives import from_main
from plumbline.launcher.runtime.ranks.rank_log import rank_log
from plumbline.launcher.runtime.ranks.world import World, read_world
from plumbline.launcher.runtime.run.folder import finished_step
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.lock import RunLockedError
from plumbline.launcher.runtime.run.status import RunStatus, begin_attempt, note_early_end
from plumbline.launcher.runtime.system import determinism
from plumbline.launcher.runtime.trackers import check_trackers
from plumbline.launcher.runtime.train.checks import check_together, open_checked
from plumbline.launcher.runtime.train.description import describe
from plumbline.launcher.runtime.train.endings import RAISED_ON_ALL_RANKS, accuse_nodes, code_of, user_facing
from plumbline.launcher.runtime.train.rehearsal import rehearse
from plumbline.launcher.runtime.train.train import train
from plumbline.launcher.runtime.train.watchdog import Watchdog, watch


def main() -> int:
    """Check everything that can be checked, then train."""
    arguments = parse_arguments()
    try:
        start = check(arguments)
        if start is None:
            return COMPLETE
        watch_time_limit(STOP, start.world.is_main)
    except (ValueError, OSError, RuntimeError) as error:
        STOP.end_if_asked()
        if isinstance(error, RuntimeError) and user_facing(error) is error:  # a bug
            raise
        return refuse(error, arguments)
    stamp_lines()
    folder, world = start.config.run.folder, start.world
    try:
        with begin_attempt(folder, world, newest_checkpoint) as status, rank_log(folder / "logs", world):
            STOP.tell, STOP.save_seconds = status.end, status.save_seconds
            return attempt(start, status)
    except (RunLockedError, OSError) as error:
        return report(error, code_of(error, folder))


class Start(NamedTuple):
    """Hold what a run needs to train, once everything was checked and its ranks have met."""

    config: Config
    inputs: Inputs
    world: World
    watchdog: Watchdog


def check(arguments: argparse.Namespace) -> Start | None:
    """Check a run, first each rank alone, then together. Returns None if nothing is to be trained. Collective."""
    world = read_world()
    reports = world.is_main and not arguments.print_config  # --print-config prints only YAML
    stage = partial(choose_stage, world=world, told=reports)
    config = branch.resolve(load_config(arguments.config, arguments.overrides, stage))
    plan = plan_run(config)
    if arguments.print_config:
        if world.is_main:
            TRAINING.info(as_yaml(config).rstrip())
        return None
    single_rank = world.size == 1  # then every answer can be given before DeepSpeed starts
    inputs = open_checked(config, plan, world, alone=single_rank)
    if single_rank:
        check_trackers(config.metrics.trackers)
        if is_finished(config, world):
            return None
    determinism.enforce(config.run.repeats, world.device)
    if world.is_main:
        TRAINING.info("\n".join(describe(config, plan, inputs, world)))
    watchdog = None if arguments.dry_run else begin_watch(config, world)
    process_group.join(world, config.deepspeed.timeout_minutes)
    if not single_rank and is_finished(config, world):
        process_group.leave()
        return None
    check_together(config, plan, inputs, world)
    if watchdog is None:
        rehearse(config, inputs, world)
        process_group.leave()
        return None
    return Start(config, inputs, world, watchdog)


def begin_watch(config: Config, world: World) -> Watchdog:
    """Return a watchdog; from now on the run's status says of a stop or a hang, even while ranks meet."""
    watchdog = watch(config, world)
    if world.is_main:
        STOP.tell = watchdog.tell = partial(note_early_end, config.run.folder, world.size, newest_checkpoint)
    return watchdog


def attempt(start: Start, status: RunStatus) -> int:
    """Train, record in the run's status how training ended, and return the exit code."""
    folder = start.config.run.folder
    try:
        complete = train(start.config, start.inputs, start.world, STOP, status, start.watchdog)
    except (ValueError, OSError, RuntimeError) as error:
        STOP.end_if_asked()
        code = code_of(error, folder, status.step)
        if code == CRASHED and user_facing(error) is error:  # a bug
            raise
        accuse_nodes(error, folder)
        return report(error, status.end(code, str(user_facing(error))))
    process_group.leave()
    TRAINING.info(f"{folder} is complete" if complete else f"stopped {STOP.reason}; the same command resumes {folder}")
    return status.end(COMPLETE, "complete") if complete else status.end(REQUEUE, f"stopped {STOP.reason}")


def is_finished(config: Config, world: World) -> bool:
    """Return whether the run is complete, and log it if so.

    Collective: rank 0 reads the folder, because other ranks may see an older version of it over the network.
    """
    step = from_main(lambda: finished_step(config), world)
    if step is not None:
        TRAINING.info(f"{config.run.folder} is complete: step {step}, nothing to do")
    return step is not None


def refuse(error: Exception, arguments: argparse.Namespace) -> int:
    """Record a start that failed in the status of its run, if that is known, and log the error."""
    code = cli.code_of_refusal(error)  # before the run folder is known
    with suppress(ValueError, OSError):  # WORLD_SIZE may be what is wrong
        folder = read_run(arguments.config, arguments.overrides).folder
        found = code_of(error, folder)
        # Before training a ValueError is no bug, and what --dry-run asks is not asked again by itself
        code = UNUSABLE if arguments.dry_run or (found == CRASHED and isinstance(error, ValueError)) else found
        if not (arguments.dry_run or arguments.print_config):
            accuse_nodes(error, folder)
            if own_rank() == "0":
                ranks = int(os.environ.get("WORLD_SIZE", "1"))
                note_early_end(folder, ranks, newest_checkpoint, code, str(user_facing(error)))
    return report(error, code)


def report(error: Exception, code: int) -> int:
    """Log an error in a form that a user can act on, and return its exit code."""
    return log_once(user_facing(error), code, isinstance(error, RAISED_ON_ALL_RANKS))


if __name__ == "__main__":
    imports.end()
    try:
        exit_code = main()
    except Exception as bug:  # print it here: threads of NCCL and gloo may hang Python's own exit, as below
        sys.excepthook(type(bug), bug, bug.__traceback__)
        exit_code = CRASHED
    with suppress(OSError):  # a closed terminal is not a failure of the run
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: gloo's threads outlive the process group and can abort the interpreter while it shuts down, which
    # would report a complete and saved run as failed
    os._exit(exit_code)
