"""Requeue a Slurm job if another attempt is worthwhile; slurm/job.sh calls this after each attempt.

    python launcher/requeue.py --config FILE                             print the step of the newest checkpoint
    python launcher/requeue.py --config FILE --code 137 --before 4000    inside a job: decide, print why, requeue
    python launcher/requeue.py --plan FILE --share 0/16                  for a task of a sweep: print finished,steps

`--code` is the exit code of srun, `--before` what this program printed when the attempt began.
Inside a job, start it with SIGTERM ignored.
Exit codes: 0 the job is requeued; 1 it is not; 2, or 89 if a disk is away, this could not be decided.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from plumbline.launcher.runtime.checkpoint.newest import newest_step
from plumbline.launcher.runtime.cluster import nodes
from plumbline.launcher.runtime.cluster.attempts import (
    FINAL,
    TALLY,
    EndedAttempt,
    Progress,
    accused,
    decide,
    once_the_disk_is_back,
    read_limit,
)
from plumbline.launcher.runtime.cluster.deadline import read_notice
from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.config.written import read_run
from plumbline.launcher.runtime.run.interventions import went_back_past
from plumbline.launcher.runtime.run.status_file import note_end_of_job, told_by_rank_0
from plumbline.launcher.runtime.sweep.advance import one_of_several, read_share
from plumbline.launcher.runtime.system.exit_codes import BROKEN, REQUEUE, UNUSABLE

NOT_REQUEUED = 1  # exit code
GOES_ON = "the same command, or the next job of a chain, goes on from the newest checkpoint"


def parse_arguments() -> argparse.Namespace:
    """Read the command line: this program's own options, and those of the program that the job runs."""
    parser = cli.Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--config", type=Path, help="YAML file of the run or sweep, as pretrain.py or sweep.py takes it"
    )
    source.add_argument("--plan", type=Path, help="plan of a sweep, as sweep.py takes it")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    parser.add_argument("--share", type=one_of_several, help="I/N: the job is a task of a sweep, with this share")
    for option in ("--workers", "--seeds", "--rows"):  # options of sweep.py, ignored here
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="of pretrain.py: the job only rehearses its run, once")
    parser.add_argument("--code", type=cli.natural, help="exit code of srun")
    parser.add_argument("--before", type=progress, default="0", help="what was saved at the start")
    arguments = parser.parse_intermixed_args()
    if arguments.plan and not arguments.share:
        parser.error("--plan needs --share I/N, the share of this task of the sweep")
    return arguments


def progress(text: str) -> Progress:
    """Parse progress as printed by this program, for argparse."""
    return tuple(int(number) for number in text.split(","))


def main() -> int:
    """Print what is saved, or decide about the attempt that ended."""
    arguments = parse_arguments()
    limit = read_limit()  # like the notice before the first attempt too, to report a mistake while the user watches
    read_notice()
    run, tally, saved = once_the_disk_is_back(partial(look, arguments))
    if arguments.code is None:
        print(",".join(map(str, saved)))
        return 0
    if arguments.dry_run:
        say(f"exit code {arguments.code} of a dry run: not requeued")
        return NOT_REQUEUED
    code = arguments.code
    told = told_by_rank_0(run) if run is not None else None
    if told in (UNUSABLE, BROKEN):
        code = told
    job_id = nodes.own_job()
    if job_id is None:
        raise ValueError("--code: this is no Slurm job, so there is nothing to put back into the queue")
    job = nodes.read_job(job_id)
    if code not in FINAL and not nodes.may_go_on(job):
        note_end(run, code)
        say(f"exit code {code}, ended by Slurm or by a person: the job is {job.state} and left as it is")
        return NOT_REQUEUED
    rolled_back = False
    if run is not None and saved < arguments.before:
        rolled_back = once_the_disk_is_back(partial(went_back_past, run, arguments.before[0]))
    attempt = EndedAttempt(code, arguments.before, saved, rolled_back, job.preempted)
    decision = once_the_disk_is_back(partial(decide, attempt, tally, limit))
    if not decision.requeue:
        note_end(run, code)
        say(f"{decision.reason}: not requeued")
        return NOT_REQUEUED
    spared, said = to_leave_out(job, tally.parent, code)
    note_end(run, code)  # before the request, after which Slurm ends this process
    try:
        nodes.requeue(job)
    except ValueError as error:
        say(f"{decision.reason}, but Slurm refuses to requeue the job ({error}): {GOES_ON}")
        return NOT_REQUEUED
    say(f"{decision.reason}: back into the queue{said}")
    nodes.exclude(job, spared)
    return 0


def look(arguments: argparse.Namespace) -> tuple[Path | None, Path, Progress]:
    """Return the run folder (None for a task of a sweep), the tally of the job's work, and how much of it is saved."""
    if arguments.share is None:
        folder = read_run(arguments.config, arguments.overrides).folder
        return folder, folder / "slurm" / f"{TALLY}.json", (newest_step(folder),)
    share = read_share(arguments.config, arguments.plan, *arguments.share)
    return None, share.folder / "slurm" / f"{TALLY}-{share.name}.json", share.saved()


def to_leave_out(job: nodes.Job, folder: Path, code: int) -> tuple[list[str], str]:
    """Return the nodes that the next attempt of a job excludes, and a description for the log.

    Excluding nodes is optional: if Slurm hides nodes from its users (PrivateData=nodes), the job is requeued anyway.
    """
    try:
        # After a requested stop no node is to blame, and time may be running out; a job at its limit starts no step
        lost = nodes.lost_nodes(job) if code != REQUEUE and job.state == "RUNNING" else []
        faults = {**dict.fromkeys(lost, "does not answer"), **accused(folder, job.nodes)}
        spared = nodes.sparable(job, faults)
    except (ValueError, KeyError, OSError) as error:
        return [], f"; nodes could not be asked ({error}): none is left out"
    return spared, without(faults, spared)


def note_end(run: Path | None, code: int) -> None:
    """Record in the status of a run, if there is one, that its job has ended."""
    if run is not None:
        note_end_of_job(run, code)


def say(decision: str) -> None:
    """Print the decision at once: Slurm ends this process soon after the request to requeue."""
    print(f"requeue.py: {decision}", flush=True)


def without(faults: Mapping[str, str], spared: Sequence[str]) -> str:
    """Describe what is wrong with which nodes, and which of them the next attempt excludes."""
    left = [node for node in faults if node not in spared]
    said, kept = (" and ".join(f"{node} {faults[node]}" for node in some) for some in (spared, left))
    return (f", without {', '.join(spared)} ({said})" if spared else "") + (
        f"; {kept}, but without it there are too few nodes" if left else ""
    )


if __name__ == "__main__":
    cli.run(main)
