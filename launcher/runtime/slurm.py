"""One pretraining run as a Slurm job: what is asked of the cluster, and the script that asks for it.

The run folder holds what was submitted: `slurm/config-N.yaml`, the configuration as it was checked, and
`slurm/submit-N.sh`, the one sbatch command that trains it. A job may wait for days; what the user edits meanwhile does
not change it. The job itself is slurm/pretrain.sbatch.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.runtime import branch, checkpoint
from launcher.runtime.config import Config, load_config, save_config
from launcher.runtime.distributed import World
from launcher.runtime.inputs import open_inputs
from launcher.runtime.run_folder import check_complete, read_result

REPOSITORY = Path(__file__).resolve().parents[2]
ABOUT = """\
# Written by launcher/submit.py. Run it again to queue the same run once more: it continues from its newest checkpoint.
# singleton: a second job of this name waits for the first, or both would write to one run folder."""


@dataclass(frozen=True)
class Request:
    """What one job asks of the cluster. An option that is None is left to slurm/cluster.env or the site's default."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None


def check(config: Config, request: Request) -> None:
    """Find out before the queue what the job would only find out after it.

    Raises:
        ValueError: a corpus is not there, damaged or too small, the ranks cannot share a batch evenly, a branch does
            not continue its parent, or the run folder holds another run.
    """
    world = World(0, 0, request.nodes * request.tasks_per_node, torch.device("cpu"))
    inputs = open_inputs(config, world)
    config = branch.resolve(config)
    branch.check(config, inputs.fingerprints, world)
    if read_result(config) is not None:
        check_complete(config)
    found = checkpoint.checkpoints(config.run.folder / "checkpoints")
    newest = next((folder for folder in found if not checkpoint.problems(folder)), None)
    if newest is not None:
        saved = load_config(newest / "config.yaml", [])
        checkpoint.check_resume(saved, config, inputs.fingerprints, newest, world)


def write_submission(config: Config, request: Request) -> Path:
    """Write the next `config-N.yaml` and `submit-N.sh` under the run's slurm/ folder; returns the script's path.

    Relative paths in the configuration mean what they mean here: the job starts in the current folder.
    """
    folder = config.run.folder / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(folder.glob("submit-*.sh")))
    config_file = folder / f"config-{number}.yaml"
    save_config(config, config_file)
    script = folder / f"submit-{number}.sh"
    options = {
        "job-name": config.run.name,
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks_per_node,
        "gpus-per-node": request.gpus_per_node,
        "cpus-per-task": request.cpus_per_task,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "dependency": "singleton",
        "output": folder / "job-%j.log",
    }
    script.write_text(render(ABOUT, options, "pretrain.sbatch", [f"--config={config_file}"]))
    return script


def render(about: str, options: Mapping[str, object], job: str, arguments: list[str]) -> str:
    """A script that submits the job script `job` of slurm/ from the current folder; options that are None are left."""
    words = [f"--{option}={value}" for option, value in options.items() if value is not None]
    words += [str(REPOSITORY / "slurm" / job), *arguments]
    command = " \\\n    ".join(shlex.quote(word) for word in words)
    root = shlex.quote(str(REPOSITORY))
    return f"""\
#!/bin/bash
{about}
cd {shlex.quote(str(Path.cwd()))} || exit
export PLUMBLINE_ROOT={root}
source {root}/slurm/cluster.env
# Unless the site names another: the Python that checked the configuration trains it.
export PLUMBLINE_PYTHON="${{PLUMBLINE_PYTHON:-{sys.executable}}}"
sbatch --parsable \\
    {command}
"""


def require_sbatch(dry_run: bool) -> None:
    """Raise ValueError where nothing can be submitted, unless it is a dry run."""
    if not dry_run and shutil.which("sbatch") is None:
        raise ValueError("sbatch not found: run this on a login node of the Slurm cluster, or add --dry-run")


def submit(script: Path) -> str:
    """Run a script of `write_submission`; returns the job id. Raises ValueError with sbatch's own words."""
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"Slurm did not take {script}: {done.stderr.strip()}")
    return done.stdout.split()[-1].split(";")[0]  # "ID" or "ID;CLUSTER"


def describe_submission(script: Path, job_id: str | None, what: str, log: str | None) -> str:
    """What was submitted and how to follow it; of a dry run (job_id None) the script itself."""
    if job_id is None:
        return f"{script.read_text()}\nnot submitted; to submit: bash {script}"
    return (
        f"job {job_id}: {what}, submitted by {script}\n"
        f"follow:            tail -F {log}\n"
        f"state:             squeue --job {job_id}\n"
        f"save and requeue:  scancel --signal=USR1 {job_id}\n"
        f"cancel:            scancel {job_id}"
    )
