"""Prepare one pretraining run as a Slurm job: check it, and write the script that submits it.

The run folder holds what was submitted: `slurm/config-N.yaml`, the configuration as it was checked, and
`slurm/submit-N.sh`, the one sbatch command that trains it. A job may wait for days, and is not affected by what the
user edits meanwhile. The job itself is slurm/pretrain.sbatch.
"""

from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch

from plumbline.launcher.runtime.checkpoint import branch
from plumbline.launcher.runtime.checkpoint.resume import check_any, check_not_lost, check_saved
from plumbline.launcher.runtime.checkpoint.store import checkpoints, newest_whole, problems
from plumbline.launcher.runtime.cluster.slurm import Request, log_file, next_number, write_script
from plumbline.launcher.runtime.config.load import save_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.models.from_stock import fetch_ahead
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.folder import finished_step
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.run.status_file import read_status
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.trackers import caution_of_trackers
from plumbline.launcher.runtime.train.checks import open_checked

ABOUT = """\
# Written by launcher/submit.py. Run it again to queue the same run once more: it continues from its newest checkpoint.
# singleton: a second job of this name waits for the first, or both would write to one run folder."""


def check(config: Config, request: Request) -> None:
    """Find problems before the job is queued that it would otherwise only find once it starts.

    Raises:
        ValueError: `open_checked` or `plan_run` refuses the run, or the run folder holds another one.
    """
    world = World(0, 0, request.nodes * request.tasks_per_node, torch.device("cpu"))
    config = branch.resolve(config)
    inputs = open_checked(config, plan_run(config), world)
    fetch_ahead(config)
    if finished_step(config) is not None:  # refuses a complete run of other values
        LOG.warning(
            f"{config.run.folder} is complete: the job would end at once; raise train.steps (or train.tokens) to train "
            "longer, or give another run.name"
        )
    root = config.run.folder / CHECKPOINTS
    newest = newest_whole(checkpoints(root), problems)
    if newest is None:
        check_any(root, checkpoints(root))
        if config.schedule.branch is None:
            check_not_lost(config)
    else:
        check_saved(newest, config, inputs.fingerprints)
    for caution in _cautions(config, request, inputs):
        LOG.warning(caution)


def _cautions(config: Config, request: Request, inputs: Inputs) -> Iterator[str]:
    """Yield warnings about a job that can be submitted, but should be changed first."""
    if request.gpus_per_node is not None and request.cpus_per_task is None:
        yield (
            "--cpus-per-task was not given: unless the site says otherwise, Slurm gives each rank one core, which "
            "training, readers, checkpoints and compilers share; give the cores of a node over its GPUs, such as "
            "--cpus-per-task 12"
        )
    if inputs.train.is_remote and request.nodes > 1 and config.data.cache.path is None:
        yield (
            "data.cache.path is not set: nodes that share their users' homes share one cache there, under one lock; "
            "give a folder on each node's own disk"
        )
    if unusable := caution_of_trackers(config.metrics.trackers):
        yield unusable
    try:
        status = read_status(config.run.folder)
    except (ValueError, OSError):  # the next start warns of it
        return
    seconds = None if status is None else status.save_seconds
    if seconds is not None and seconds > request.notice / 2:
        yield (
            f"the last save of {config.run.folder} took {seconds:.0f} s, more than half of the {request.notice} s of "
            f"--notice, and a stop may wait for a save before its own; give --notice {ceil(3 * seconds)}"
        )


def write_submission(config: Config, open_stage: bool, request: Request, chain: int) -> Path:
    """Write the next `config-N.yaml` and `submit-N.sh` to the run's slurm/ folder, and return the script's path.

    Relative paths in the configuration keep their meaning, since the job starts in the current folder.

    Args:
        config: the run, as it was checked.
        open_stage: let each job choose its ZeRO stage for the devices that it gets (`deepspeed.zero_stage: auto`).
        request: resources to request from the cluster.
        chain: number of jobs that the script queues, each of which waits for those before it.
    """
    folder = config.run.folder / "slurm"
    number = next_number(folder)
    config_file = folder / f"config-{number}.yaml"
    save_config(config, config_file, open_stage)
    script = folder / f"submit-{number}.sh"
    options = {
        "job-name": config.run.name,
        **request.options,
        "dependency": "singleton",
        "output": log_file(folder, "job-%j.log"),
    }
    write_script(script, ABOUT, options, "pretrain.sbatch", [f"--config={config_file}"], request.notice, chain)
    return script
