"""A sweep as one Slurm job array: what is asked of the cluster, and the script that asks for it.

The sweep's folder holds what was submitted: `slurm/plan-N.json`, every cell as it was checked and the list of runs that
the tasks count off, and `slurm/submit-N.sh`, the one sbatch command. Each task is slurm/sweep.sbatch.
"""

from dataclasses import dataclass
from pathlib import Path

from plumbline.launcher.runtime.sweep.plan import Plan, save_plan
from plumbline.launcher.runtime.system.slurm import render

ABOUT = """\
# Written by launcher/sweep.py. Run it again to queue the same runs again: a task skips those that are finished."""


@dataclass(frozen=True)
class Request:
    """What the array asks of the cluster. An option that is None is left to slurm/cluster.env or the site's default."""

    tasks: int
    gpus_per_task: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None


def write_submission(plan: Plan, request: Request) -> Path:
    """Write the next `plan-N.json` and `submit-N.sh` under the sweep's slurm/ folder; returns the script's path.

    Relative paths in the configurations mean what they mean here: the job starts in the current folder.
    """
    folder = plan.sweep.folder / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(folder.glob("submit-*.sh")))
    plan_file, script = folder / f"plan-{number}.json", folder / f"submit-{number}.sh"
    save_plan(plan, plan_file)
    options = {
        "job-name": plan.sweep.name,
        "array": f"0-{min(request.tasks, len(plan.runs)) - 1}",
        "gpus-per-task": request.gpus_per_task,
        "cpus-per-task": request.cpus_per_task,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "output": folder / "job-%A_%a.log",
    }
    script.write_text(render(ABOUT, options, "sweep.sbatch", [f"--plan={plan_file}"]), encoding="utf-8")
    return script
