# PYTHON_ARGCOMPLETE_OK
"""Check a configuration and queue its pretraining on a Slurm cluster.

python launcher/submit.py --config configs/NAME.yaml --nodes 4 --gpus-per-node 8 --cpus-per-task 12 train.steps=20000

The configuration is read, checked and stored in the run folder together with the sbatch command (see
launcher/runtime/train/submission.py); slurm/pretrain.sbatch is what then runs on the nodes.
"""

import argparse

from plumbline.launcher.runtime.commands import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--config", type=cli.existing, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    parser.add_argument("--nodes", type=cli.positive, default=1, help="number of nodes (default: 1)")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument(
        "--gpus-per-node", type=cli.gpus, help="GPUs on each node, 4 or h100:4; one rank runs on each GPU"
    )
    ranks.add_argument("--tasks-per-node", type=cli.positive, help="ranks on each node of a cluster without GPUs")
    parser.add_argument("--cpus-per-task", type=cli.positive, help="cores of each rank, its readers of data among them")
    parser.add_argument(
        "--chain",
        type=cli.positive,
        default=1,
        metavar="N",
        help="queue N jobs, each of which continues where the previous one ended",
    )
    cli.add_job_options(parser, "one job")
    parser.add_argument("--dry-run", action="store_true", help="write and print the submit script, submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    cli.begin(parse_arguments)  # ahead of the imports below, which take seconds


from plumbline.launcher.runtime.cluster.slurm import Request, count_of, describe_submission, require_sbatch, submit
from plumbline.launcher.runtime.config.load import leaves_stage_open, load_config
from plumbline.launcher.runtime.train.submission import check, write_submission


def main() -> None:
    """Check the run, write and submit the job, and print how to follow it."""
    arguments = parse_arguments()
    request = Request(
        nodes=arguments.nodes,
        tasks_per_node=arguments.tasks_per_node or count_of(arguments.gpus_per_node),
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_task=arguments.cpus_per_task,
        **cli.job_options(arguments),
    )
    config = load_config(arguments.config, arguments.overrides, min)  # stage for auto: no check depends on it
    open_stage = leaves_stage_open(arguments.config, arguments.overrides)
    check(config, request)
    require_sbatch(arguments.dry_run)
    script = write_submission(config, open_stage, request, arguments.chain)
    jobs = [] if arguments.dry_run else submit(script)
    logs = [str(script.parent / f"job-{job_id}.log") for job_id in jobs]
    if arguments.json:
        first = {"job_id": jobs[0] if jobs else None, "log": logs[0] if logs else None}
        cli.print_json({**first, "jobs": jobs, "script": str(script)})
    else:
        what = f"{config.run.name} on {request.nodes} nodes x {request.tasks_per_node} ranks"
        print(describe_submission(script, jobs, what, "".join(logs[:1])))


if __name__ == "__main__":
    cli.run(main)
