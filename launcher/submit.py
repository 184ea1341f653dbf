"""Check a configuration and queue its pretraining on a Slurm cluster.

The configuration is read, checked and stored in the run folder together with the sbatch command (see
launcher/runtime/slurm.py); slurm/pretrain.sbatch is what then runs on the nodes.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from launcher.runtime.config import load_config
from launcher.runtime.slurm import Request, check, submit, write_submission

EXAMPLE = """\
example, 4 nodes of 8 GPUs:
  python launcher/submit.py --config configs/NAME.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 train.steps=20000
"""


def _positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Queue a pretraining run on a Slurm cluster.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")
    parser.add_argument("--nodes", type=_positive, default=1, help="number of nodes (default: 1)")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--gpus-per-node", type=_positive, help="GPUs on each node; one rank runs on each GPU")
    ranks.add_argument("--tasks-per-node", type=_positive, help="ranks on each node of a cluster without GPUs")
    parser.add_argument("--cpus-per-task", type=_positive, help="cores of each rank, its data workers included")
    parser.add_argument("--time", help="time limit of one job, e.g. 24:00:00; a longer run requeues itself")
    parser.add_argument("--partition", help="default: slurm/cluster.env, else the cluster's")
    parser.add_argument("--account", help="default: slurm/cluster.env, else the cluster's")
    parser.add_argument("--dry-run", action="store_true", help="write and print the submit script, submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser.parse_intermixed_args()


def main() -> int:
    """Check, write, submit, and say how to follow the job; 0, or 2 if the request cannot be met."""
    arguments = _parse()
    try:
        request = Request(
            nodes=arguments.nodes,
            tasks_per_node=arguments.gpus_per_node or arguments.tasks_per_node,
            gpus_per_node=arguments.gpus_per_node,
            cpus_per_task=arguments.cpus_per_task,
            time=arguments.time,
            partition=arguments.partition,
            account=arguments.account,
        )
        config = load_config(arguments.config, arguments.overrides)
        check(config, request)
        if not arguments.dry_run and shutil.which("sbatch") is None:
            raise ValueError("sbatch not found: run this on a login node of the Slurm cluster, or add --dry-run")
        script = write_submission(config, request)
        job_id = None if arguments.dry_run else submit(script)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    log = None if job_id is None else str(script.parent / f"job-{job_id}.log")
    if arguments.json:
        print(json.dumps({"job_id": job_id, "script": str(script), "log": log}, indent=2))
    elif job_id is None:
        print(f"{script.read_text()}\nnot submitted; to submit: bash {script}")
    else:
        size = f"{request.nodes} nodes x {request.tasks_per_node} ranks"
        print(f"job {job_id}: {config.run.name} on {size}, submitted by {script}")
        print(f"follow:            tail -F {log}")
        print(f"state:             squeue --job {job_id}")
        print(f"save and requeue:  scancel --signal=USR1 {job_id}")
        print(f"cancel:            scancel {job_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
