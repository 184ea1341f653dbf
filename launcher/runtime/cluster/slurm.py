"""Submit jobs to Slurm: the request to the cluster, and the script that submits it."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plumbline.launcher.runtime.cluster.attempts import TALLY
from plumbline.launcher.runtime.cluster.deadline import NOTICE
from plumbline.launcher.runtime.cluster.slurm_queue import why_never
from plumbline.launcher.runtime.system.installation import ROOT
from plumbline.launcher.runtime.system.log import LOG

OURS = f"PLUMBLINE_ROOT,{NOTICE},PLUMBLINE_PYTHON"
"""Variables by which a script of `write_script` passes locations to a job."""
START_SECONDS = 120
"""Minimum seconds of an attempt before its notice: half for a start, and half because Slurm's notice may be early."""


@dataclass(frozen=True)
class Request:
    """Describe what a job requests from the cluster; None leaves it to slurm/cluster.env or the site's default."""

    nodes: int = 1
    tasks_per_node: int = 1
    array: int | None = None
    """Number of jobs in an array, each with the full request, or None for a single job."""
    gpus_per_node: str | None = None
    """A number, or TYPE:NUMBER, here and below."""
    gpus_per_task: str | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    notice: int = 300
    """Seconds before the time limit when the ranks are asked to save."""
    site: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch, passed on unchanged."""

    def __post_init__(self) -> None:
        """Refuse a time limit that would end an attempt before it has trained.

        Raises:
            ValueError: it is not a time, or shorter than the notice and a start.
        """
        limit = None if self.time is None else _seconds(self.time)
        if limit is not None and limit < self.notice + START_SECONDS:
            least = -(-(self.notice + START_SECONDS) // 60)
            raise ValueError(
                f"--time {self.time} is less than {self.notice} s of --notice and {START_SECONDS} s to start in: each "
                f"attempt would save after its first step; give --time {least} (minutes) or more, or a shorter --notice"
            )

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
            "signal": f"USR1@{self.notice}",
            **self.site,
            "mail-type": "END,FAIL" if "mail-user" in self.site else None,  # sbatch sends no mail without a type
        }


def count_of(gpus: str) -> int:
    """Return the number of GPUs in N or TYPE:N."""
    return int(gpus.rpartition(":")[2])


def _seconds(time: str) -> int | None:
    """Return the seconds of a time limit as sbatch reads it, or None if it is unlimited."""
    if time.upper() in ("0", "UNLIMITED", "INFINITE"):  # sinfo prints the last in small letters
        return None
    found = re.fullmatch(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise ValueError(f"--time {time} is no time limit: give minutes, H:MM:SS or D-HH:MM:SS")
    numbers = [int(number) for number in found.groups()[1:] if number is not None]
    # D-H, D-H:M and H:M:S begin with hours, M and M:S with minutes
    units = (3600, 60, 1) if found["days"] or len(numbers) == 3 else (60, 1)
    return 86400 * int(found["days"] or 0) + sum(unit * number for unit, number in zip(units, numbers, strict=False))


def log_file(folder: Path, name: str) -> str:
    """Return the path of a log for sbatch, which expands % in the name, with % in the folder escaped."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def next_number(folder: Path) -> int:
    """Return the number of the next submission in a folder, above all existing ones; the folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = (re.fullmatch(r"(?!job)[a-z]+-(\d+)\.\w+", file.name) for file in folder.iterdir())
    return 1 + max((int(found[1]) for found in taken if found), default=0)


def write_script(
    path: Path,
    about: str,
    options: Mapping[str, object],
    job: str,
    arguments: Sequence[str],
    notice: int,
    count: int = 1,
) -> None:
    """Write a script that submits the job script `job` of slurm/ from the current folder, and prints the job id.

    Once Slurm has accepted the job, the script deletes the counts of fruitless attempts beside it.

    Args:
        path: of the script.
        about: comment lines for its readers.
        options: of sbatch; those that are None are omitted.
        job: name of the job script.
        arguments: of the job script.
        notice: seconds before the time limit when the job saves, for `deadline.read_notice`.
        count: number of equal jobs to submit.
    """
    path.write_text(_render(path.parent, about, options, job, arguments, notice, count), encoding="utf-8")


def _render(
    folder: Path,
    about: str,
    options: Mapping[str, object],
    job: str,
    arguments: Sequence[str],
    notice: int,
    count: int,
) -> str:
    words = [f"--{option}={value}" for option, value in options.items() if value is not None]
    words += [str(ROOT / "slurm" / job), *arguments]
    command = " \\\n    ".join(shlex.quote(word) for word in words)
    root = shlex.quote(str(ROOT))
    before, after = ("", "") if count == 1 else (f"for _ in {{1..{count}}}; do\n", "\ndone")
    return f"""\
#!/bin/bash
{about}
cd {shlex.quote(str(Path.cwd()))} || exit
# Within another job the shell has the shape of that one in variables, which sbatch would hand on.
[[ -z "${{SLURM_JOB_ID:-}}" ]] || for name in "${{!SLURM_@}}" "${{!SRUN_@}}"; do
    [[ "$name" == SLURM_CONF || "$name" == SLURM_CLUSTERS ]] || unset "$name"
done
export PLUMBLINE_ROOT={root}
export {NOTICE}={notice}
source {root}/slurm/cluster.env
# Unless the site names another: the Python that checked the configuration trains it.
[[ -n "${{PLUMBLINE_PYTHON:-}}" ]] || PLUMBLINE_PYTHON={shlex.quote(sys.executable)}
export PLUMBLINE_PYTHON
# A site that hands no variables on (SBATCH_EXPORT=NONE) still has to hand on these.
case ",${{SBATCH_EXPORT:-ALL}}," in
    *,ALL,*) ;;
    *,NONE,* | *,NIL,*) export SBATCH_EXPORT={OURS} ;;
    *) export SBATCH_EXPORT+=,{OURS} ;;
esac
{before}sbatch --parsable \\
    {command} || exit
# Who submits has looked at what failed before: fruitless attempts are counted anew.
rm -f {shlex.quote(str(folder))}/{TALLY}*.json{after}
"""


def require_sbatch(dry_run: bool) -> None:
    """Raise ValueError if jobs cannot be submitted here, unless it is a dry run."""
    if not dry_run and shutil.which("sbatch") is None:
        raise ValueError("sbatch not found: run this on a login node of the Slurm cluster, or add --dry-run")


def submit(script: Path) -> list[str]:
    """Run a script of `write_script` and return the job ids; warn if the first job will never start.

    Raises:
        ValueError: Slurm did not accept the job, or not all of a chain, with sbatch's message; or sbatch named no job.
    """
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    # Lines of "ID" or "ID;CLUSTER", perhaps after output of the site's modules
    lines = (re.fullmatch(r"(\d+)(;\S*)?", line.strip()) for line in done.stdout.splitlines())
    jobs = [found[1] for found in lines if found]
    if done.returncode:
        queued = f", but has queued before it: {', '.join(jobs)} (scancel {' '.join(jobs)} takes back)" if jobs else ""
        raise ValueError(f"Slurm did not take {script}{queued}: {done.stderr.strip()}")
    if not jobs:
        raise ValueError(
            f"{script}: sbatch named no job; whether there is one, squeue --me says: {done.stdout.strip()[:200]!r}"
        )
    if (reason := why_never(jobs[0])) is not None:
        LOG.warning(
            f"job {jobs[0]} will not start, {reason}; scancel {' '.join(jobs)}, then submit with another --time, "
            "--nodes, --partition or --qos"
        )
    return jobs


def describe_submission(script: Path, jobs: Sequence[str], what: str, log: str) -> str:
    """Return what was submitted and how to follow it, or for a dry run, which has no jobs, the script itself."""
    path = shlex.quote(str(script))
    if not jobs:
        return f"{script.read_text()}\nnot submitted; to submit: bash {path}"
    job_id, *later = jobs
    chain = "".join(f", then job {other}" for other in later)
    return (
        f"job {job_id}{chain}: {what}, submitted by {path}\n"
        f"follow:            tail -F {shlex.quote(log)}\n"
        f"state:             squeue --job {job_id}\n"
        f"save and requeue:  scancel --signal=USR1 {job_id}\n"
        f"cancel:            scancel {' '.join(jobs)}"
    )
