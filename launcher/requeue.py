"""Put a Slurm job back into the queue after an attempt that is worth another; slurm/pretrain.sbatch calls it.

    python launcher/requeue.py --config FILE                             print the step of the newest checkpoint
    python launcher/requeue.py --config FILE --code 137 --before 4000    inside a job: decide, say why, requeue

`--code` is what srun returned, `--before` the step of the newest checkpoint when the attempt began. Exit codes: 0 the
job is requeued; 1 it is not; 2 that could not be decided or done. Inside a job, start it with SIGTERM ignored.
"""

import argparse
import os
from pathlib import Path

from plumbline.launcher.runtime.checkpoint.store import checkpoints, step_of
from plumbline.launcher.runtime.config.written import read_run
from plumbline.launcher.runtime.run.status_file import note_end_of_job
from plumbline.launcher.runtime.system import cli, nodes
from plumbline.launcher.runtime.system.attempts import FINAL, Attempt, decide, read_limit
from plumbline.launcher.runtime.system.exit_codes import REQUEUE

NOT_REQUEUED = 1  # exit code


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run, as pretrain.py takes it")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    parser.add_argument("--code", type=cli.natural, help="exit code of srun")
    parser.add_argument("--before", type=cli.natural, default=0, help="step of the newest checkpoint at the start")
    return parser.parse_intermixed_args()


def main() -> int:
    """Print the newest step, or decide about the attempt that ended."""
    arguments = parse_arguments()
    limit = read_limit()  # before the first attempt, too: a mistake in it is told while somebody looks
    folder = read_run(arguments.config, arguments.overrides).folder
    newest = next(map(step_of, checkpoints(folder / "checkpoints")), 0)
    if arguments.code is None:
        print(newest)
        return 0
    code, job_id = arguments.code, os.environ["SLURM_JOB_ID"]
    job = nodes.read_job(job_id)
    if code not in FINAL and not nodes.may_go_on(job):
        note_end_of_job(folder, code)
        say(f"exit code {code}, ended by Slurm or by a person: the job is {job.state} and left as it is")
        return NOT_REQUEUED
    tally = folder / "slurm" / f"attempts-{job_id}.json"
    decision = decide(Attempt(code, arguments.before, newest), tally, limit)
    if not decision.requeue:
        note_end_of_job(folder, code)
        say(f"{decision.reason}: not requeued")
        return NOT_REQUEUED
    # After a requested stop no node is to blame, and time may be running out; a job at its limit starts no step
    lost = nodes.lost_nodes(job) if code != REQUEUE and job.state == "RUNNING" else []
    spared = lost if nodes.can_spare(job, lost) else []
    say(f"{decision.reason}: back into the queue{without(lost, spared)}")
    note_end_of_job(folder, code)
    nodes.requeue(job, spared)
    return 0


def say(decision: str) -> None:
    """Print the decision at once: Slurm ends this process soon after the request to requeue."""
    print(f"requeue.py: {decision}", flush=True)


def without(lost: list[str], spared: list[str]) -> str:
    """Say which nodes do not answer, and whether the next attempt does without them."""
    if not lost:
        return ""
    names = ", ".join(lost)
    return f", without {names}" if spared else f"; {names} does not answer, but without it there are too few nodes"


if __name__ == "__main__":
    cli.run(main)
