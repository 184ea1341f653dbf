# PYTHON_ARGCOMPLETE_OK
"""Train a grid of runs, each once, and summarize the results: on this machine, or as a Slurm job array.

    python launcher/sweep.py --config configs/sweeps/grid.yaml                       one worker per GPU, or per core
    python launcher/sweep.py --config configs/sweeps/grid.yaml --workers 2 train.steps=100
    python launcher/sweep.py --config configs/sweeps/grid.yaml --dry-run             check it, train nothing
    python launcher/sweep.py --config configs/sweeps/grid.yaml --summarize --json    results so far
    python launcher/sweep.py --config configs/sweeps/grid.yaml --summarize --rows FILE      the same, from rows alone
    python launcher/sweep.py --config configs/sweeps/grid.yaml --seeds 1             one seed now, the others later
    python launcher/sweep.py --config configs/sweeps/grid.yaml --slurm --tasks 16 --gpus-per-task 1 --time 8:00:00
    python launcher/sweep.py --config configs/sweeps/grid.yaml --share 0/2           every second run; 1/2: the others

The same command again trains what is missing: finished cells are kept, failed ones are tried again. The results are
results.jsonl, summary.json, summary.txt and, for some kinds, summary.png in the sweep's folder; report.py makes a page
from them. They cover all seeds that were started, not only those of --seeds, and keep the rows of finished runs whose
folders were deleted. If another section.key=value removes cells, their rows are moved to others.jsonl, and count again
when the cells return. With --rows, runs that are finished in another machine's results.jsonl are not trained again;
with --summarize as well, only that file is read, and no run or corpus is needed.

Exit codes:
    0   all finished
    1   cells failed
    2   unusable configuration, data or request
    4   all finished except for runs that other processes are training
    85  asked to stop (SIGUSR1, SIGTERM, Ctrl-C, a closed terminal), cells in progress saved: start it again
    89  in a Slurm job: the disk with the plan or the data was away: start it again
"""

import argparse
from pathlib import Path

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.sweep.advance import one_of_several
from plumbline.launcher.runtime.system.exit_codes import ELSEWHERE, REQUEUE
from plumbline.launcher.runtime.system.node_folder import use_node_folder
from plumbline.launcher.runtime.system.signals import StopRequest

STOP = StopRequest()  # before the imports below, which take seconds; each worker process executes this too


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=cli.existing, help="YAML file of the sweep (see configs/sweeps/)")
    source.add_argument("--plan", type=cli.existing, help="a plan that --slurm saved, instead of --config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values for all cells")
    parser.add_argument("--workers", type=cli.positive, help="processes (default: one for each GPU, or for each core)")
    parser.add_argument(
        "--share", type=one_of_several, default="0/1", help="I/N: train only every N-th run from the I-th on"
    )
    parser.add_argument("--seeds", type=integers, help="1,2,...: train only these of the sweep's seeds")
    parser.add_argument(
        "--rows", type=cli.existing, metavar="FILE", help="results.jsonl of this sweep from another machine"
    )
    parser.add_argument("--summarize", action="store_true", help="do not train, only summarize finished runs")
    parser.add_argument(
        "--json", action="store_true", help="print the summary, or the submission, as one JSON document"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the sweep and train nothing; with --slurm, write and print the submit script",
    )
    slurm = parser.add_argument_group("as a Slurm job array")
    slurm.add_argument("--slurm", action="store_true", help="queue the unfinished runs")
    slurm.add_argument(
        "--tasks", type=cli.positive, default=1, help="number of tasks of the array, which share the runs (default: 1)"
    )
    slurm.add_argument(
        "--gpus-per-task", type=cli.gpus, help="GPUs of each task, which has a worker for each: 2 or h100:2"
    )
    slurm.add_argument("--cpus-per-task", type=cli.positive, help="cores of each task; without GPUs, its workers")
    cli.add_job_options(slurm, "one task")
    arguments = parser.parse_intermixed_args()
    for option in () if arguments.slurm else ("--gpus-per-task", "--cpus-per-task", *cli.JOB_OPTIONS):
        if cli.value_of(arguments, option) is not None:
            parser.error(f"{option} is for a Slurm job: add --slurm, or leave it out")
    if arguments.plan and arguments.overrides:
        parser.error(f"{arguments.overrides[0]}: a plan is fixed; give values with --config")
    if arguments.plan and arguments.seeds:
        parser.error("--seeds: a plan is fixed; give seeds with --config")
    if arguments.rows and (arguments.plan or arguments.slurm):
        parser.error("--rows: tasks of a job array read run folders alone; give it without --plan and --slurm")
    return arguments


def integers(text: str) -> list[int]:
    """Parse 1,2,..., for argparse."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    STOP.end_at_once()  # until there is a run to save
    parse_arguments()  # ahead of the imports below, which take seconds: --help and mistakes are answered at once
    use_node_folder()


from plumbline.launcher.runtime.cluster.slurm import Request, describe_submission, require_sbatch, submit
from plumbline.launcher.runtime.sweep.config import SweepConfig, load_sweep
from plumbline.launcher.runtime.sweep.plan import Plan, load_plan, make_plan
from plumbline.launcher.runtime.sweep.result import read_rows
from plumbline.launcher.runtime.sweep.results import SweepSummary, check_same_cells, summarize, write_results
from plumbline.launcher.runtime.sweep.slurm import write_submission
from plumbline.launcher.runtime.sweep.training import intention, report_failed, runs_of, trackers_of, train
from plumbline.launcher.runtime.system.log import LOG
from plumbline.launcher.runtime.trackers import caution_of_trackers

FAILED = 1  # exit code


def main() -> int:
    """Check every cell, train those that are not finished, summarize the results."""
    arguments = parse_arguments()
    if arguments.rows and arguments.summarize:
        sweep = load_sweep(arguments.config)
        show(sweep, summarize(sweep, read_rows(arguments.rows)), arguments.json, arguments.rows)
        return 0
    if arguments.plan:
        plan = load_plan(arguments.plan)
    else:
        plan = make_plan(arguments.config, arguments.overrides, arguments.seeds, arguments.rows)
    check_same_cells(plan.sweep, plan.cells, train=not arguments.summarize)
    if arguments.slurm:
        return queue(plan, arguments)
    if arguments.dry_run:
        LOG.info(intention(plan, arguments.share, arguments.workers))
        return 0
    left = [] if arguments.summarize else train(plan, arguments.share, arguments.workers, STOP)
    asked = set() if arguments.summarize and not arguments.seeds else {cell.config.run.seed for cell in plan.runs}
    summary = write_results(plan.sweep, plan.cells, plan.elsewhere, asked)
    show(plan.sweep, summary, arguments.json, plan.sweep.folder)
    if STOP:
        LOG.info(f"stopped {STOP.reason}; the same command goes on with {plan.sweep.folder}")
        return REQUEUE
    if report_failed(runs_of(plan, arguments.share)):
        return FAILED
    if left := plan.unfinished(left):
        LOG.info(
            f"{len(left)} run(s) are not finished: other processes are at them; start the same command again later"
        )
        return ELSEWHERE
    return 0


def show(sweep: SweepConfig, summary: SweepSummary, as_json: bool, source: Path) -> None:
    """Print the results of a sweep, and which runs they come from."""
    if as_json:
        cli.print_json(summary.to_json())
    else:
        print("\n".join(sweep.how.lines(summary.found)))
        print(f"{source}: {', '.join(f'{count} {status}' for status, count in summary.runs.items())}")


def queue(plan: Plan, arguments: argparse.Namespace) -> int:
    """Submit the unfinished runs as a job array, and print how to follow it."""
    todo = Plan(plan.sweep, plan.cells, plan.unfinished(plan.runs))
    if not todo.runs:
        raise ValueError(f"{plan.sweep.folder}: all runs are finished, there is nothing to queue")
    require_sbatch(arguments.dry_run)
    if unusable := caution_of_trackers(trackers_of(todo.runs)):
        LOG.warning(unusable)
    request = Request(
        array=min(arguments.tasks, len(todo.runs)),
        gpus_per_task=arguments.gpus_per_task,
        cpus_per_task=arguments.cpus_per_task,
        **cli.job_options(arguments),
    )
    script = write_submission(todo, request)
    jobs = [] if arguments.dry_run else submit(script)
    job_id = jobs[0] if jobs else None
    if arguments.json:
        cli.print_json({"job_id": job_id, "script": str(script), "runs": len(todo.runs)})
    else:
        what = f"{len(todo.runs)} runs of {plan.sweep.name} in {request.array} task(s)"
        print(describe_submission(script, jobs, what, f"{script.parent}/job-{job_id}_0.log"))
    return 0


if __name__ == "__main__":
    cli.run(main)
