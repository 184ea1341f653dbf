"""Submit jobs to Slurm: what is asked of the cluster, and the script that asks for it."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Request:
    """State what a job asks of the cluster; what is None is left to slurm/cluster.env or the site's default."""

    nodes: int = 1
    tasks_per_node: int = 1
    array: int | None = None
    """Number of jobs in an array, each of which asks for all of this; None: a single job."""
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None

    @property
    def options(self) -> dict[str, object]:
        """Return the request as options of sbatch."""
        return {
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "array": None if self.array is None else f"0-{self.array - 1}",
            "gpus-per-node": self.gpus_per_node,
            "gpus-per-task": self.gpus_per_task,
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }


def next_number(folder: Path) -> int:
    """Return the number of the next submission that a folder takes; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return 1 + len(list(folder.glob("submit-*.sh")))


def write_script(path: Path, about: str, options: Mapping[str, object], job: str, arguments: Sequence[str]) -> None:
    """Write a script that submits the job script `job` of slurm/ from the current folder.

    Args:
        path: of the script.
        about: comment lines for who reads it.
        options: of sbatch; those that are None are left out.
        job: name of the job script.
        arguments: of the job script.
    """
    path.write_text(_render(about, options, job, arguments), encoding="utf-8")


def _render(about: str, options: Mapping[str, object], job: str, arguments: Sequence[str]) -> str:
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
    """Run a script of `write_script` and return the job id. Raises ValueError with sbatch's own words."""
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"Slurm did not take {script}: {done.stderr.strip()}")
    return done.stdout.split()[-1].split(";")[0]  # "ID" or "ID;CLUSTER"


def describe_submission(script: Path, job_id: str | None, what: str, log: str | None) -> str:
    """Say what was submitted and how to follow it; of a dry run (job_id None) give the script itself."""
    if job_id is None:
        return f"{script.read_text()}\nnot submitted; to submit: bash {script}"
    return (
        f"job {job_id}: {what}, submitted by {script}\n"
        f"follow:            tail -F {log}\n"
        f"state:             squeue --job {job_id}\n"
        f"save and requeue:  scancel --signal=USR1 {job_id}\n"
        f"cancel:            scancel {job_id}"
    )
