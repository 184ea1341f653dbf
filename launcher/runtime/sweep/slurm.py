"""Prepare a sweep as one Slurm job array: the request to the cluster, and the script that submits it.

The sweep's folder keeps what was submitted: `slurm/plan-N.json`, with every checked cell and the list of runs that the
tasks share, and `slurm/submit-N.sh`, with the sbatch command. Each task runs slurm/sweep.sbatch.
"""

from pathlib import Path

from plumbline.launcher.runtime.cluster.slurm import Request, log_file, next_number, write_script
from plumbline.launcher.runtime.sweep.plan import Plan, save_plan

ABOUT = """\
# Written by launcher/sweep.py. Run it again to queue the same runs again: a task skips those that are finished."""


def write_submission(plan: Plan, request: Request) -> Path:
    """Write the next `plan-N.json` and `submit-N.sh` to the sweep's slurm/ folder, and return the script's path.

    The job starts in the current folder, so relative paths in the configurations keep their meaning.
    """
    folder = plan.sweep.folder / "slurm"
    number = next_number(folder)
    plan_file, script = folder / f"plan-{number}.json", folder / f"submit-{number}.sh"
    save_plan(plan, plan_file)
    options = {"job-name": plan.sweep.name, **request.options, "output": log_file(folder, "job-%A_%a.log")}
    write_script(script, ABOUT, options, "sweep.sbatch", [f"--plan={plan_file}"], request.notice)
    return script
